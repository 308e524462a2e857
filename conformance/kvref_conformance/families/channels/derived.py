"""Derived operations of the cache that quantizes keys per channel."""

from kvref_conformance.conversation.derived import Derived

DERIVED = (Derived("clear", "KIVI-08", ("truncate",), lambda cache: cache.truncate(0)),)
