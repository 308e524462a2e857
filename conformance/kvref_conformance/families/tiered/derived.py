"""Derived operations of the tiered cache."""

from kvref_conformance.conversation.derived import Derived
from kvref_conformance.conversation.exchange import kinds_of
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.outcome import NotOffered


def truncated_to_nothing(cache: Handle) -> None:
    try:
        cache.truncate(0)
    except Exception as error:
        if "NotTruncatable" in kinds_of(error):
            raise NotOffered("clear after tokens migrated (derived from truncate)") from error
        raise


DERIVED = (
    Derived("clear", "EDIT-01", ("truncate",), truncated_to_nothing),
    Derived("total_tokens", "TIER-06", ("stats",), lambda cache: cache.stats().total_tokens),
    Derived("total_tokens", "TIER-03", ("read",), lambda cache: len(cache.read()[0])),
)
