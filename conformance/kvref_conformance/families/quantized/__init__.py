"""The family `quantized`: a cache that quantizes tokens when they are appended."""

from collections.abc import Mapping
from typing import Any

from kvref_conformance.families import Family
from kvref_conformance.families.laws.spoken import OF_CACHES
from kvref_conformance.oracle.formats import IN_GROUPS, ROTATED, STATIC, SYMMETRIC, group_of, scales_fit


def fits(config: Mapping[str, Any]) -> bool:
    """Returns whether the group divides head_dim, and scales are passed exactly for formats that need them and are valid."""
    return config["head_dim"] % group_of(config["format"]) == 0 and scales_fit(config, "format")


FAMILY = Family(
    name="quantized",
    chapter="quantized",
    small={"num_layers": 2, "capacity": 20, "num_kv_heads": 2, "head_dim": 5, "format": "int8"},
    speaks_for=(
        *OF_CACHES,
        "ATTN-10",
        *(f"QUANT-{n:02}" for n in (1, 2, 4, 5, 7, 8, 10)),
        "FMT-STATIC-08",
        "EDIT-01",
        "EDIT-02",
        *(f"MOVE-{n:02}" for n in (1, 3, 4, 7)),
    ),
    gives={"save": "data"},
    formats={"format": (*SYMMETRIC, *IN_GROUPS, *STATIC, *ROTATED)},
    fits=fits,
    appending={"append": ("keys", "values")},
)
