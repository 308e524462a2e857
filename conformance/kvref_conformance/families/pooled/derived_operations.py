"""Derived operations of the pooled cache."""

from kvref_conformance.calls.derived_operations import DerivedOperation

DERIVED = (
    DerivedOperation("total_tokens", "POOL-06", ("stats",), lambda cache: cache.stats().total_tokens),
    DerivedOperation("total_tokens", "POOL-02", ("read",), lambda cache: len(cache.read()[0])),
)
