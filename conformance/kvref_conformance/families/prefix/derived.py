"""Derived operations of the prefix cache: those of the paged cache, and `create`."""

from kvref_conformance.conversation.derived import Derived
from kvref_conformance.families.paged.derived import DERIVED as OF_PAGES

DERIVED = (*OF_PAGES, Derived("create", "PREFIX-01", ("begin",), lambda cache: cache.begin([])))
