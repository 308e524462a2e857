"""Single values in a format: what they are encoded to, and what codes stand for."""

from kvref_conformance.families import Family

FAMILY = Family(
    name="elements",
    chapter="formats",
    encodes=True,
)
