"""Derived operations of the grouped cache."""

from kvref_conformance.calls.derived_operations import DerivedOperation

DERIVED = (DerivedOperation("create", "GROUP-05", ("begin",), lambda cache: cache.begin([])),)
