"""Derived operations of the windowed cache."""

from functools import partial

import numpy as np

from kvref_conformance.calls.derived_operations import DerivedOperation, call_in_order, slice_tokens
from kvref_conformance.calls.messages import error_kinds
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import NDArray


def append_by_step(cache: ObjectProxy, keys: NDArray, values: NDArray) -> None:
    """Appends by `step`, with queries of zeros, and ignores the attention output."""
    count = getattr(keys, "array", keys).shape[:1]  # keys may be an OwnArray, and may have a wrong shape
    cache.step(np.zeros((*count, cache.config["num_kv_heads"], cache.config["head_dim"]), np.float32), keys, values, 1.0)


def step_token_by_token(cache: ObjectProxy, query: NDArray, keys: NDArray, values: NDArray, scale: float) -> NDArray:
    if not len(keys) or len({len(query), len(keys), len(values)}) > 1:
        raise NotOffered("step of 0 tokens, or of arrays of different lengths (derived from append and attend)")

    def step_one(at: range) -> NDArray:
        cache.append(slice_tokens(keys, 0, at), slice_tokens(values, 0, at))
        attended: NDArray = cache.attend(slice_tokens(query, 0, at), scale)
        return attended

    return np.concatenate(call_in_order(partial(step_one, range(i, i + 1)) for i in range(len(keys))))


def clear_by_truncate(cache: ObjectProxy) -> None:
    try:
        cache.truncate(0)
    except Exception as error:
        if "NotTruncatable" in error_kinds(error):
            raise NotOffered("clear after tokens were evicted (derived from truncate)") from error
        raise


def count_readable(cache: ObjectProxy) -> int:
    """Returns the number of positions that `read` accepts."""
    count = 0
    for position in range(cache.length):
        try:
            cache.read([position])
            count += 1
        except Exception as error:
            if "PositionOutOfRange" not in error_kinds(error):
                raise
    return count


DERIVED = (
    DerivedOperation("append", "WIN-02", ("step",), append_by_step),
    DerivedOperation("step", "WIN-02", ("append", "attend"), step_token_by_token, splits_appends=True),
    DerivedOperation("clear", "WIN-06", ("truncate",), clear_by_truncate),
    DerivedOperation("stored_tokens", "WIN-03", ("length", "read"), count_readable),
)
