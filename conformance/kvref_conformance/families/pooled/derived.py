"""Derived operations of the pooled cache."""

from kvref_conformance.conversation.derived import Derived

DERIVED = (
    Derived("total_tokens", "POOL-06", ("stats",), lambda cache: cache.stats().total_tokens),
    Derived("total_tokens", "POOL-02", ("read",), lambda cache: len(cache.read()[0])),
)
