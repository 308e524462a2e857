"""Operations of the cache that quantizes keys by channel made of others."""

from kvref_conformance.conversation.derived import Derived

DERIVED = (Derived("clear", "KIVI-08", ("truncate",), lambda cache: cache.truncate(0)),)
