"""The cache of one row a token that all heads share."""

from typing import Any

from kvref_conformance.families import Family
from kvref_conformance.families.laws.spoken import OF_CACHES
from kvref_conformance.oracle.formats import PACKED, PLAIN

TILE = 128  # numbers of a latent that share a scale


def fits(config: Any) -> bool:
    """A packed latent has a scale for each tile of it."""
    return bool(config["dtype"] != PACKED or config["rank"] % TILE == 0)


FAMILY = Family(
    name="latent",
    chapter="latents",
    small={"rank": 6, "rope_dim": 4, "max_tokens": 20, "dtype": "float32"},
    speaks_for=(*(law for law in OF_CACHES if law != "LAW-11"), "MLA-02", "MLA-03", "MLA-04", "MLA-05", "EDIT-01", "EDIT-02"),
    gives={"save": "data"},
    formats={"dtype": (*PLAIN, PACKED)},
    fits=fits,
    token_axis=-2,
    appending={"append": ("latent", "rope")},
)
