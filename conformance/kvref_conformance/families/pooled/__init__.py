"""The family `pooled`: a cache whose blocks are stored in buffers of a pool."""

from kvref_conformance.families import Family
from kvref_conformance.families.laws.spoken import OF_CACHES

FAMILY = Family(
    name="pooled",
    chapter="pooled",
    small={"num_kv_heads": 2, "head_dim": 5, "tokens_per_block": 3, "max_tokens": 20},
    speaks_for=(*(law for law in OF_CACHES if law != "LAW-11"), *(f"POOL-{n:02}" for n in range(1, 7))),
    holds={"max_tokens": ("tokens_per_block",)},
    appending={"append": ("keys", "values")},
)
