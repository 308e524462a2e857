"""Derived operations of the tiered cache."""

from kvref_conformance.calls.derived_operations import DerivedOperation
from kvref_conformance.calls.messages import error_kinds
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.exceptions import NotOffered


def clear_by_truncate(cache: ObjectProxy) -> None:
    try:
        cache.truncate(0)
    except Exception as error:
        if "NotTruncatable" in error_kinds(error):
            raise NotOffered("clear after tokens migrated (derived from truncate)") from error
        raise


DERIVED = (
    DerivedOperation("clear", "EDIT-01", ("truncate",), clear_by_truncate),
    DerivedOperation("total_tokens", "TIER-06", ("stats",), lambda cache: cache.stats().total_tokens),
    DerivedOperation("total_tokens", "TIER-03", ("read",), lambda cache: len(cache.read()[0])),
)
