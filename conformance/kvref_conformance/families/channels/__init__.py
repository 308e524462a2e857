"""The family `channels`: a cache that quantizes keys per channel, and stores its newest tokens unquantized."""

from typing import Any

from kvref_conformance.families import Family
from kvref_conformance.families.laws.spoken import OF_CACHES
from kvref_conformance.oracle.channels import FORMATS
from kvref_conformance.oracle.formats import PLAIN, group_of


def fits(config: Any) -> bool:
    """Returns whether the residual and head_dim are multiples of the group."""
    group = group_of(config["format"])
    return bool(config["residual"] % group == 0 and config["head_dim"] % group == 0)


FAMILY = Family(
    name="channels",
    chapter="channels",
    small={
        "num_kv_heads": 2, "head_dim": 32, "max_tokens": 100, "residual": 64, "format": "uint4_g32_float16", "dtype": "float32",
        "rollback": 0,
    },
    speaks_for=(*OF_CACHES, "ATTN-10", *(f"KIVI-{n:02}" for n in (1, 2, 3, 5, 6, 7, 8)), "EDIT-02"),
    formats={"format": FORMATS, "dtype": PLAIN},
    may_be_zero=("rollback",),
    fits=fits,
    appending={"append": ("keys", "values")},
)  # fmt: skip
