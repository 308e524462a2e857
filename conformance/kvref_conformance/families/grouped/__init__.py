"""The family `grouped`: sequences in blocks, for models in which some layers see every token and the others a window."""

from kvref_conformance.families import Family
from kvref_conformance.families.laws.spoken import OF_CACHES
from kvref_conformance.oracle.formats import PLAIN, SCALED, group_of

SMALL = {
    "num_blocks": 26, "block_size": 3, "num_layers": 4, "num_groups": 2, "window": 7, "num_kv_heads": 2, "head_dim": 5,
    "dtype": "float32",
}  # fmt: skip

FAMILY = Family(
    name="grouped",
    chapter="groups",
    small=SMALL,
    speaks_for=(
        *OF_CACHES,
        *(f"GROUP-{n:02}" for n in range(1, 8)),
        *("PAGED-01", "PAGED-07", "PREFIX-02", "PREFIX-11", "PREFIX-14", "PREFIX-15"),
        *("SHARE-03", "EDIT-01", "EDIT-02"),
    ),
    gives={"create": "sequence", "fork": "sequence", "begin": "sequence"},
    formats={"dtype": (*PLAIN, *SCALED)},
    fits=lambda config: config["head_dim"] % group_of(config["dtype"]) == 0,
    may_be_zero=("num_blocks",),
    multiples={"num_layers": "num_groups"},
    appending={"step": ("keys", "values")},
    whole=("step",),  # the blocks that its first query sees stay allocated until the next step (GROUP-02)
)
