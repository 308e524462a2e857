"""The family `latent`: a cache with one row per token, which all heads share."""

from typing import Any

from kvref_conformance.families import Family
from kvref_conformance.families.laws.spoken import OF_CACHES
from kvref_conformance.oracle.formats import PACKED, PLAIN, SCALED, group_of

TILE = 128  # numbers of a latent that share a scale


def fits(config: Any) -> bool:
    """Returns whether the rank is a multiple of the tile if packed, or else rank and rope_dim are multiples of the group."""
    group = group_of(config["dtype"])
    rope = config["rope_dim"] if config["dtype"] != PACKED else 0
    return bool(config["rank"] % (TILE if config["dtype"] == PACKED else group) == 0 and rope % group == 0)


FAMILY = Family(
    name="latent",
    chapter="latents",
    small={"rank": 6, "rope_dim": 4, "max_tokens": 20, "dtype": "float32"},
    speaks_for=(
        *(law for law in OF_CACHES if law != "LAW-11"),
        "MLA-02",
        "MLA-03",
        "MLA-04",
        "MLA-05",
        "MLA-06",
        "EDIT-01",
        "EDIT-02",
    ),
    gives={"save": "data"},
    formats={"dtype": (*PLAIN, PACKED, *SCALED)},
    fits=fits,
    token_axis=-2,
    appending={"append": ("latent", "rope")},
)
