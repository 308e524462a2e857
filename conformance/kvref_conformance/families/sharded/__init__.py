"""The sharded cache: one sequence, with heads and tokens divided among several ranks."""

from typing import Any

from kvref_conformance.families import Family
from kvref_conformance.families.laws.spoken import OF_CACHES
from kvref_conformance.oracle.formats import PLAIN


def goes(config: Any) -> bool:
    """Whether heads and rows of ranks divide evenly, one way or the other (SHARD-01)."""
    heads, rows = config["num_kv_heads"], config["head_ranks"]
    return bool(heads % rows == 0 or rows % heads == 0)


FAMILY = Family(
    name="sharded",
    chapter="sharded",
    small={
        "num_kv_heads": 2, "head_dim": 5, "head_ranks": 4, "token_ranks": 3, "block_size": 2, "num_blocks": 7, "dtype": "float32",
    },
    speaks_for=(*OF_CACHES, *(f"SHARD-{n:02}" for n in range(1, 5)), "EDIT-01", "EDIT-02"),
    formats={"dtype": PLAIN},
    goes=goes,
    appending={"append": ("keys", "values")},
)  # fmt: skip
