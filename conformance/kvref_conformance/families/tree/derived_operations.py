"""Derived operations of the tree cache."""

from kvref_conformance.calls.derived_operations import DerivedOperation

DERIVED = (DerivedOperation("length", "TREE-12", ("read",), lambda cache, sequence: len(cache.read(sequence)[0])),)
