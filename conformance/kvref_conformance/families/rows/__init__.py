"""Rows of numbers that share a scale: quantized, and read back."""

from kvref_conformance.families import Family

FAMILY = Family(
    name="rows",
    chapter="formats",
    encodes=True,
)
