"""Derived operations of the quantized cache."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from kvref_conformance.calls.derived_operations import DerivedOperation, call_in_order, slice_tokens
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import NDArray

Pair = tuple[NDArray, NDArray]


def read_each_token(cache: ObjectProxy, layer: int, positions: Sequence[int]) -> Pair:
    return _stacked([cache.read_token(layer, position) for position in positions])


def read_each_head(cache: ObjectProxy, layer: int, position: int) -> Pair:
    return _stacked([cache.read_head(layer, position, head) for head in range(cache.config["num_kv_heads"])])


def read_one_token(cache: ObjectProxy, layer: int, position: int) -> Pair:
    keys, values = cache.read_tokens(layer, [position])
    return keys[0], values[0]


def read_head_of_token(cache: ObjectProxy, layer: int, position: int, head: int) -> Pair:
    keys, values = cache.read_token(layer, position)
    if not 0 <= head < len(keys):
        raise NotOffered("read_head of a head that does not exist (derived from read_token)")
    return keys[head], values[head]


def append_by_steps(cache: ObjectProxy, layer: int, keys: Any, values: Any) -> None:
    """An append to a cache with one layer is one step per token. Arrays that cannot be divided are passed on, to be rejected."""
    if cache.config["num_layers"] != 1 or layer != 0:
        raise NotOffered("append to one of several layers (derived from append_step)")
    lengths = {np.shape(getattr(array, "array", array))[:1] for array in (keys, values)}
    if lengths == {(0,)}:
        raise NotOffered("append of 0 tokens (derived from append_step)")
    if len(lengths) > 1 or () in lengths:
        cache.append_step(keys, values)
    else:
        ((count,),) = lengths
        tokens = [range(n, n + 1) for n in range(count)]
        call_in_order(partial(cache.append_step, slice_tokens(keys, 0, each), slice_tokens(values, 0, each)) for each in tokens)


def append_to_every_layer(cache: ObjectProxy, keys: Any, values: Any) -> None:
    if not _have_one_shape(keys, values) or len(keys) != cache.config["num_layers"]:
        raise NotOffered("append_step of other arrays than one token per layer (derived from append)")
    call_in_order(partial(cache.append, layer, keys[layer][None], values[layer][None]) for layer in range(len(keys)))


def _stacked(pairs: Sequence[Pair]) -> Pair:
    if not pairs:
        raise NotOffered("reading 0 positions (derived from reading one)")
    return np.stack([keys for keys, _ in pairs]), np.stack([values for _, values in pairs])


def _have_one_shape(keys: Any, values: Any) -> bool:
    """Returns whether both are NumPy arrays of the same 3-D shape."""
    return isinstance(keys, np.ndarray) and isinstance(values, np.ndarray) and keys.shape == values.shape and keys.ndim == 3


DERIVED = (
    DerivedOperation("read_tokens", "QUANT-04", ("read_token",), read_each_token),
    DerivedOperation("read_token", "QUANT-04", ("read_head",), read_each_head),
    DerivedOperation("read_token", "QUANT-04", ("read_tokens",), read_one_token),
    DerivedOperation("read_head", "QUANT-04", ("read_token",), read_head_of_token),
    DerivedOperation("clear", "EDIT-01", ("truncate",), lambda cache: cache.truncate(0)),
    DerivedOperation("append", "QUANT-01", ("append_step",), append_by_steps, splits_appends=True),
    DerivedOperation("append_step", "QUANT-01", ("append",), append_to_every_layer),
)
