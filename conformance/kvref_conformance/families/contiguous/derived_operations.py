"""Derived operations of the contiguous cache."""

from typing import Any

import numpy as np

from kvref_conformance.calls.derived_operations import DerivedOperation
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.contiguous.checks import decode_buffer
from kvref_conformance.implementation_api import NDArray


def append_fused_by_append(cache: ObjectProxy, key_values: Any) -> None:
    if not isinstance(key_values, np.ndarray) or key_values.ndim != 5 or len(key_values) != 2:
        raise NotOffered("append_fused of other arrays than [2, ...] (derived from append)")
    cache.append(key_values[0], key_values[1])


def append_by_append_fused(cache: ObjectProxy, keys: Any, values: Any) -> None:
    both = isinstance(keys, np.ndarray) and isinstance(values, np.ndarray)
    if not both or (keys.shape, keys.dtype) != (values.shape, values.dtype):
        raise NotOffered("append of keys and values of different shapes or dtypes (derived from append_fused)")
    cache.append_fused(np.stack([keys, values]))


def read_from_raw(cache: ObjectProxy) -> tuple[NDArray, NDArray]:
    keys, values = (decode_buffer(buffer, cache.config["dtype"]) for buffer in cache.raw())
    return keys[:, :, : cache.seq_len], values[:, :, : cache.seq_len]


DERIVED = (
    DerivedOperation("append_fused", "CONTIG-09", ("append",), append_fused_by_append),
    DerivedOperation("append", "CONTIG-09", ("append_fused",), append_by_append_fused),
    DerivedOperation("read", "CONTIG-07", ("raw", "seq_len"), read_from_raw),
    DerivedOperation("reset", "EDIT-01", ("truncate",), lambda cache: cache.truncate(0)),
    DerivedOperation("seq_len", "CONTIG-03", ("read",), lambda cache: cache.read()[0].shape[2]),
)
