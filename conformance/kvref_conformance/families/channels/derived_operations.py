"""Derived operations of the cache that quantizes keys per channel."""

from kvref_conformance.calls.derived_operations import DerivedOperation

DERIVED = (DerivedOperation("clear", "KIVI-08", ("truncate",), lambda cache: cache.truncate(0)),)
