"""The family `paged`: a cache of sequences in blocks."""

from kvref_conformance.families import Family
from kvref_conformance.families.laws.spoken import OF_CACHES
from kvref_conformance.families.paged.one_table import OneTable
from kvref_conformance.oracle.formats import PLAIN, SCALED, group_of, scales_fit

SMALL = {
    "num_blocks": 24, "block_size": 3, "num_layers": 2, "num_kv_heads": 2, "head_dim": 5, "dtype": "float32",
}  # fmt: skip

FAMILY = Family(
    name="paged",
    chapter="paged",
    small=SMALL,
    speaks_for=(
        *OF_CACHES,
        "LAW-02",
        "LAW-03",
        "ATTN-10",
        *(f"PAGED-{n:02}" for n in (*range(1, 14), 15, 16, 17)),
        *(f"SHARE-{n:02}" for n in (3, 4, 5, 6, 7)),
        *(f"EDIT-{n:02}" for n in (1, 2, 4, 10)),
        *(f"MOVE-{n:02}" for n in (1, 2, 3, 4, 7)),
    ),
    gives={"create": "sequence", "fork": "sequence", "save": "data"},
    several={"sequences": "sequence"},
    formats={"dtype": (*PLAIN, *SCALED)},
    fits=lambda config: config["head_dim"] % group_of(config["dtype"]) == 0 and scales_fit(config, "dtype"),
    may_be_zero=("num_blocks",),
    appending={"write": ("keys", "values")},
    counted_as={"one_block_table": OneTable},
)
