"""The family `windowed`: a cache that stores the newest tokens and the sink tokens."""

from kvref_conformance.families import Family
from kvref_conformance.families.laws.spoken import OF_CACHES
from kvref_conformance.oracle.formats import PLAIN, SCALED, group_of

SMALL = {"num_kv_heads": 2, "head_dim": 5, "window": 7, "sinks": 0, "chunk": 0, "rollback": 0, "dtype": "float32"}

FAMILY = Family(
    name="windowed",
    chapter="windows",
    small=SMALL,
    speaks_for=(*OF_CACHES, *(f"WIN-{n:02}" for n in range(1, 8)), "WIN-10", "EDIT-02", "ATTN-07"),
    gives={"save": "data"},
    formats={"dtype": (*PLAIN, *SCALED)},
    fits=lambda config: config["head_dim"] % group_of(config["dtype"]) == 0,
    may_be_zero=("sinks", "chunk", "rollback"),
    appending={"append": ("keys", "values"), "step": ("query", "keys", "values")},
)
