"""The family `attention`: attention functions without a cache."""

from kvref_conformance.families import Family

FAMILY = Family(
    name="attention",
    chapter="attention",
)
