"""The family `blocks`: the block pool."""

from kvref_conformance.families import Family

FAMILY = Family(
    name="blocks",
    chapter="blocks",
    small={"num_blocks": 5},
    speaks_for=("LAW-03", "LAW-11", "LAW-12", *(f"BLOCK-{n:02}" for n in range(1, 8)), "SHARE-01", "SHARE-02"),
    gives={"allocate": "block"},
    may_be_zero=("num_blocks",),
)
