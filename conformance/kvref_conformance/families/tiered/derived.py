"""Operations of the tiered cache made of others."""

from kvref_conformance.conversation.derived import Derived

DERIVED = (
    Derived("total_tokens", "TIER-06", ("stats",), lambda cache: cache.stats().total_tokens),
    Derived("total_tokens", "TIER-03", ("read",), lambda cache: len(cache.read()[0])),
)
