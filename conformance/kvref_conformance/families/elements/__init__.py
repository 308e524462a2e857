"""The family `elements`: encoding and decoding of single values."""

from kvref_conformance.families import Family

FAMILY = Family(
    name="elements",
    chapter="formats",
    encodes=True,
)
