"""Kernels alone: scatter, gather and update, for those who have no cache."""

from kvref_conformance.families import Family

FAMILY = Family(
    name="kernels",
    chapter="kernels",
)
