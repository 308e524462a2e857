"""Helpers of attention adapters: padding for causal masks that count from the first token, and a check of the value width."""

from typing import Any

from kvref_conformance.outcome import NotOffered


def rows_before(query: Any, length: int) -> int:
    """Return the number of zero rows to insert before the queries, for a causal mask that puts query 0 at position 0."""
    if len(query) > length:
        raise NotOffered("more queries than tokens")
    return int(length) - len(query)


def same_width(query: Any, keys: Any, values: Any) -> None:
    """Raise NotOffered if values have another width than the keys: the library documents one width for both."""
    if query.shape[-1] == keys.shape[-1] and values.ndim == keys.ndim and values.shape[-1] not in (0, keys.shape[-1]):
        raise NotOffered("values whose width differs from that of the keys")
