"""Attention over tokens that are handed in."""

from kvref_conformance.families import Family

FAMILY = Family(
    name="attention",
    chapter="attention",
)
