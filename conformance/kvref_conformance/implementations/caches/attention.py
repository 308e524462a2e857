"""What adapters of attention have in common: masks that count from the first token on, and values as wide as the keys."""

from typing import Any

from kvref_conformance.outcome import NotOffered


def rows_before(query: Any, length: int) -> int:
    """How many rows of zeros stand before queries of the last tokens, so that a mask that counts from the first token fits."""
    if len(query) > length:
        raise NotOffered("queries before the first token")
    return int(length) - len(query)


def same_width(query: Any, keys: Any, values: Any) -> None:
    """Raise NotOffered for values of another width than the keys, where these are right: documented is that both have one."""
    if query.shape[-1] == keys.shape[-1] and values.ndim == keys.ndim and values.shape[-1] not in (0, keys.shape[-1]):
        raise NotOffered("values of another width than the keys")
