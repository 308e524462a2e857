"""Block store with host blocks, and copies between the two."""

from kvref_conformance.families import Family
from kvref_conformance.oracle.formats import IN_GROUPS, PLAIN, SYMMETRIC, group_of

FAMILY = Family(
    name="hosted",
    chapter="moving",
    small={"num_blocks": 4, "block_size": 3, "num_kv_heads": 2, "head_dim": 5, "format": "float32", "capacity": 6},
    speaks_for=("LAW-01", "LAW-04", "LAW-12", "MOVE-12"),
    formats={"format": (*PLAIN, *SYMMETRIC, *IN_GROUPS)},
    may_be_zero=("num_blocks", "capacity"),
    fits=lambda config: config["head_dim"] % group_of(config["format"]) == 0,
)
