"""Whose numbers came where others belong: rows of what was read, found among those that were handed in."""

from collections.abc import Sequence

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.conversation.exchange import Exchange, show_calls

LEAST = 8  # numbers that a row must have to be told from another by them


def whose(row: NDArray | None, conversation: Sequence[Exchange]) -> str:
    """Where a row [n] was handed in, or that it is zeros; nothing where that says nothing."""
    if row is None or row.ndim != 1 or len(row) < LEAST:
        return ""
    if not row.any():
        return "zeros"
    for exchange in reversed(conversation):
        for name, array in exchange.request.args.items():
            if isinstance(array, np.ndarray) and array.ndim > 1 and array.shape[-1] == len(row) and array.dtype.kind == "f":
                found = np.argwhere((array == row).all(axis=-1))
                if len(found):
                    at = ", ".join(str(int(index)) for index in found[0])
                    return f"which is {name}[{at}] of {_call(exchange, conversation)}"
    return ""


def _call(exchange: Exchange, conversation: Sequence[Exchange]) -> str:
    """The line that shows it."""
    if exchange.quiet:
        return exchange.request.op
    shown = [each.request.id for each in conversation if not each.quiet]
    return show_calls(conversation)[shown.index(exchange.request.id)]
