"""The family `kernels`: scatter, gather, copy and update without a cache."""

from kvref_conformance.families import Family

FAMILY = Family(
    name="kernels",
    chapter="kernels",
)
