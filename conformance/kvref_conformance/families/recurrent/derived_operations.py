"""Derived operations of the recurrent cache."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from kvref_conformance.calls.derived_operations import DerivedOperation, call_in_order
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.recurrent.recurrence import PARTS
from kvref_conformance.implementation_api import NDArray


def append_as_a_batch(cache: ObjectProxy, sequence: int, **arrays: Any) -> None:
    """Appends a batch of one row without padding."""
    wholes = {name: getattr(array, "array", array) for name, array in arrays.items()}  # also of an OwnArray
    if any(len(whole.shape) != 4 for whole in wholes.values()):
        raise NotOffered("append of other arrays than [num_layers, n, num_heads, ...] (derived from append_batch)")
    rows = {
        name: whole[:, None] if isinstance(whole, np.ndarray) else type(arrays[name])(whole[:, None])
        for name, whole in wholes.items()
    }
    cache.append_batch([sequence], [wholes["keys"].shape[1]], **rows)


def append_each_row(cache: ObjectProxy, sequences: Sequence[int], counts: Sequence[int], **arrays: NDArray) -> None:
    shapes = {np.shape(each)[:4] for each in arrays.values()}
    config, width = cache.config, {np.ndim(each) for each in arrays.values()}
    sizes = [config[size] if size else 2 for size in PARTS.values()]
    good = width == {5} and len(shapes) == 1 and [each.shape[4] for each in arrays.values()] == sizes
    layers, rows, tokens, heads = shapes.pop() if good else (0, 0, 0, 0)
    good = good and (layers, rows, heads) == (config["num_layers"], len(sequences), config["num_heads"]) and len(counts) == rows
    if not good or not all(0 <= count <= tokens for count in counts):
        raise NotOffered("append_batch of wrong shapes or counts (derived from append)")
    call_in_order(
        partial(cache.append, sequence, **{name: each[:, row, :count] for name, each in arrays.items()})
        for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True))
    )


def matrix_by_applying(cache: ObjectProxy, sequence: int, layer: int) -> NDArray:
    """The read-outs of queries with a single 1."""
    heads, width = cache.config["num_heads"], cache.config["key_dim"]
    query = np.repeat(np.eye(width, dtype=np.float32)[:, None], heads, axis=1)
    return np.swapaxes(np.asarray(cache.apply(sequence, layer, query)), 0, 1)


DERIVED = (
    DerivedOperation("append", "RECUR-05", ("append_batch",), append_as_a_batch),
    DerivedOperation("append_batch", "RECUR-05", ("append",), append_each_row),
    DerivedOperation("read_matrix", "RECUR-02", ("apply",), matrix_by_applying),
    DerivedOperation("create", "RECUR-11", ("begin",), lambda cache: cache.begin([])),
)
