"""Derived operations of the grouped cache."""

from kvref_conformance.conversation.derived import Derived

DERIVED = (Derived("create", "GROUP-05", ("begin",), lambda cache: cache.begin([])),)
