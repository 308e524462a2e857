"""The source of a wrong row: finds the earlier argument from which the implementation returned a row in the wrong place."""

from collections.abc import Sequence

import numpy as np

from kvref_conformance.calls.messages import Exchange, format_calls
from kvref_conformance.implementation_api import NDArray

MIN_ROW_WIDTH = 8  # numbers in a row; a shorter row can equal another by chance


def find_source_of_row(row: NDArray | None, call_trace: Sequence[Exchange]) -> str:
    """The argument and position that contain the row [n], as text; "zeros"; or "" if the row is unknown or too short."""
    if row is None or row.ndim != 1 or len(row) < MIN_ROW_WIDTH:
        return ""
    if not row.any():
        return "zeros"
    for exchange in reversed(call_trace):
        for name, array in exchange.request.args.items():
            if isinstance(array, np.ndarray) and array.ndim > 1 and array.shape[-1] == len(row) and array.dtype.kind == "f":
                found = np.argwhere((array == row).all(axis=-1))
                if len(found):
                    at = ", ".join(str(int(index)) for index in found[0])
                    return f"which is {name}[{at}] of {_format_call(exchange, call_trace)}"
    return ""


def _format_call(exchange: Exchange, call_trace: Sequence[Exchange]) -> str:
    """The call as a line of Python."""
    if exchange.quiet:
        return exchange.request.op
    shown = [each.request.id for each in call_trace if not each.quiet]
    return format_calls(call_trace)[shown.index(exchange.request.id)]
