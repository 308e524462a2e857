"""Bookkeeping of a host store: which keys are stored, being stored, being loaded or evicted."""

from kvref_conformance.families import Family

FAMILY = Family(
    name="offload",
    chapter="moving",
    small={"capacity": 4},
    speaks_for=("LAW-01", "LAW-12", "MOVE-06", "MOVE-08", "MOVE-09", "MOVE-10", "MOVE-11"),
    may_be_zero=("capacity",),
)
