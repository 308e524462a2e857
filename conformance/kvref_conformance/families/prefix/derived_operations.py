"""Derived operations of the prefix cache: those of the paged cache, and `create`."""

from kvref_conformance.calls.derived_operations import DerivedOperation
from kvref_conformance.families.paged.derived_operations import DERIVED as OF_PAGES

DERIVED = (*OF_PAGES, DerivedOperation("create", "PREFIX-01", ("begin",), lambda cache: cache.begin([])))
