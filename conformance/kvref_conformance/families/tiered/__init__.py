"""The tiered cache: recent tokens in a plain dtype, older tokens in quantized formats."""

from kvref_conformance.families import Family
from kvref_conformance.families.laws.spoken import OF_CACHES
from kvref_conformance.oracle.formats import PLAIN, SCALED, group_of

SMALL = {
    "num_kv_heads": 2, "head_dim": 5, "max_tokens": 20, "tail_length": 4, "tail_dtype": "float16", "warm_length": 0,
    "warm_format": "q8", "store_format": "q4", "migration_batch": 3,
}  # fmt: skip
EDITS = ("EDIT-01", "EDIT-02", "EDIT-06")

FAMILY = Family(
    name="tiered",
    chapter="tiered",
    small=SMALL,
    speaks_for=(*OF_CACHES, "ATTN-10", *(f"TIER-{n:02}" for n in (1, 2, 3, 5, 6, 7, 8, 10, 13, 14, 17, 18)), *EDITS),
    gives={"save": "data"},
    formats={"tail_dtype": PLAIN, "warm_format": SCALED, "store_format": SCALED},
    fits=lambda config: all(config["head_dim"] % group_of(config[name]) == 0 for name in ("warm_format", "store_format")),
    may_be_zero=("tail_length", "warm_length"),
    holds={"max_tokens": ("tail_length", "warm_length")},
    appending={"append": ("keys", "values")},
)
