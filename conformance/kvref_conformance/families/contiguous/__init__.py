"""The family `contiguous`: one growing buffer for a batch of sequences."""

from kvref_conformance.families import Family
from kvref_conformance.families.laws.spoken import OF_CACHES
from kvref_conformance.oracle.formats import PLAIN

SMALL = {
    "batch_size": 1, "num_kv_heads": 2, "head_dim": 5, "initial_capacity": 3, "max_seq_len": 20, "dtype": "float32",
}  # fmt: skip

FAMILY = Family(
    name="contiguous",
    chapter="contiguous",
    small=SMALL,
    speaks_for=(
        *OF_CACHES,
        *(f"CONTIG-{n:02}" for n in (*range(1, 8), *range(9, 13))),
        *(f"EDIT-{n:02}" for n in (1, 2, 7, 8, 9)),
    ),
    formats={"dtype": PLAIN},
    may_be_zero=("initial_capacity",),
    token_axis=-2,
    appending={"append": ("keys", "values"), "append_fused": ("key_values",)},
)
