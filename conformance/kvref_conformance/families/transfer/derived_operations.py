"""Derived operations of the transfer cache."""

from kvref_conformance.calls.derived_operations import DerivedOperation

DERIVED = (DerivedOperation("length", "TRANSFER-12", ("gather",), lambda cache, sequence: len(cache.gather(sequence, 0)[0])),)
