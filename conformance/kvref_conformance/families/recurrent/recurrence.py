"""The recurrences in float64, with the bound of RECUR-02, and tokens to append.

A matrix is computed token by token, by definition. Its error bound covers every order of computation that RECUR-02 permits:

- Token by token, a token has at most key_dim + 6 roundings per element, each relative to A: n (key_dim + 6) u A for n tokens.
- In chunks, SSD is one sum: each of its terms has two products, n + 1 additions, and the error of its decays.
- In chunks, the delta rule solves a triangular system I + L. By substitution or with an explicit inverse, the error is at most
  g(n) N (I + |L|) N |rhs| with N = (I - |L|)^-1. N (I + |L|) N = (2 N - I) N <= 2 n N elementwise, because L is nilpotent: this
  is 2 n^2 u A. The errors of L itself, key_dim + 3 roundings and its decays, are multiplied by N in the same way.
- A decay of several tokens is a product, with a rounding per token, or exp of a difference of sums of logarithms: an absolute
  error of the logarithm of (2 n + 4) u L.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.attention import U
from kvref_conformance.oracle.formats.small_floats import round_to

ROUNDING = {"float32": (0.0, 0.0), "float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}
INTEGERS = {"float32": 2**24, "float16": 2**11, "bfloat16": 2**8}  # every integer up to it is exact
LARGEST = {"float32": 2.0**100, "float16": 2.0**15, "bfloat16": 2.0**100}  # larger matrices are not judged
SMALLEST = 2.0**-60  # smaller numbers other than 0 are not judged
EVALUATION = 1 + 1e-6  # for the rounding of the bound itself, and for products of errors

Tokens = dict[str, NDArray]  # inputs, keys, values and gates, [num_layers, n, num_heads, ...]
PARTS = {"inputs": "channels", "keys": "key_dim", "values": "value_dim", "gates": ""}


@dataclass(frozen=True)
class LayerState:
    """The state of a layer. inputs: as stored. matrix: exact, float64. error: its bound; infinite if it is not judged."""

    inputs: NDArray
    matrix: NDArray
    error: NDArray


State = tuple[LayerState, ...]


def zero_state(config: Mapping[str, Any]) -> State:
    heads = config["num_heads"]
    matrix = np.zeros((heads, config["key_dim"], config["value_dim"]))
    inputs = np.zeros((config["num_inputs"], heads, config["channels"]), np.float32)
    return (LayerState(inputs, matrix, matrix),) * int(config["num_layers"])


def states_after(state: State, tokens: Tokens, config: Mapping[str, Any]) -> list[State]:
    """The states after each of the tokens of one append."""
    layers = [_layer_after(old, {name: each[layer] for name, each in tokens.items()}, config) for layer, old in enumerate(state)]
    return list(zip(*layers, strict=True))


def _layer_after(state: LayerState, tokens: Tokens, config: Mapping[str, Any]) -> list[LayerState]:
    rounded = round_to(tokens["inputs"].astype(np.float32), config["dtype"])
    history = np.concatenate([state.inputs, rounded])
    keys, values, gates = (tokens[name].astype(np.float64) for name in ("keys", "values", "gates"))
    delta, matrix, found = bool(config["delta_rule"]), state.matrix, list[LayerState]()
    with np.errstate(all="ignore"):
        for at in range(len(keys)):
            matrix = update(matrix, keys[at], values[at], gates[at], delta)
            found.append(LayerState(history[at + 1 : at + 1 + len(state.inputs)], matrix, np.full(matrix.shape, np.inf)))
        if not judged(state, keys, values, gates):
            return found
        if sums_are_exact(state, found, keys, values, gates, config):
            return [replace(each, error=np.zeros(matrix.shape)) for each in found]
        return [replace(each, error=e) for each, e in zip(found, _bounds(state, found, keys, values, gates, config), strict=True)]


def update(matrix: NDArray, key: NDArray, value: NDArray, gate: NDArray, delta: bool, sign: float = -1.0) -> NDArray:
    """The matrices after one token (RECUR-02). sign: 1 for the recurrence of magnitudes."""
    matrix = gate[:, 0, None, None] * matrix
    if delta:
        value = value + sign * np.einsum("hk,hkv->hv", key, matrix)
    after: NDArray = matrix + gate[:, 1, None, None] * key[:, :, None] * value[:, None, :]
    return after


def judged(state: LayerState, *numbers: NDArray) -> bool:
    """Whether the bound applies: no overflow, no underflow, and gates in their ranges."""
    gates = numbers[-1]
    ranges = ((gates >= 0) & (gates <= 1)).all() and (gates[..., 0] > 0).all()
    sizes = [np.abs(each[each != 0]) for each in (*numbers, state.matrix)]
    return bool(
        ranges
        and np.isfinite(state.error).all()
        and all((each >= SMALLEST).all() and (each <= 1 / SMALLEST).all() for each in sizes)
    )


def sums_are_exact(
    state: LayerState, found: Sequence[LayerState], keys: NDArray, values: NDArray, gates: NDArray, config: Mapping[str, Any]
) -> bool:
    """Whether RECUR-02 (c) applies. The factor 4 n covers the intermediate sums of the delta rule in chunks."""
    one_hot = np.isin(keys, (0, 1)).all() and (keys.sum(axis=-1) <= 1).all()
    whole = all((each == np.round(each)).all() for each in (values, state.matrix))
    gated = (gates[..., 0] == 1).all() and np.isin(gates[..., 1], (0, 1)).all()
    if not (one_hot and whole and gated and not state.error.any()):
        return False
    most = max(np.abs(each).max(initial=0) for each in (values, state.matrix, *(after.matrix for after in found)))
    return bool(4 * len(keys) * most <= 2**24 and most <= INTEGERS[config["matrix_dtype"]])


def _bounds(
    state: LayerState, found: Sequence[LayerState], keys: NDArray, values: NDArray, gates: NDArray, config: Mapping[str, Any]
) -> list[NDArray]:
    """The bound of RECUR-02 after each token, with the number of tokens of the whole append."""
    count, delta, width = len(keys), bool(config["delta_rule"]), config["key_dim"]
    logs = np.abs(np.log(gates[..., 0])).sum(axis=0)[:, None, None]
    decays = (4 * count + (2 * count + 4) * logs) * U
    factor = (count + 4) * U + decays
    if delta:
        factor = (count + 1) * (3 * count + 2 * width + 20) * U + (2 * count + 2) * decays
    relative, absolute = ROUNDING[config["matrix_dtype"]]
    magnitude, carried, ones, nothing = (
        np.abs(state.matrix) + state.error,
        state.error,
        np.ones(state.matrix.shape),
        values[0] * 0,
    )
    bounds = list[NDArray]()
    for at, after in enumerate(found):
        key, value, gate = np.abs(keys[at]), np.abs(values[at]), gates[at]
        magnitude = update(magnitude, key, value, gate, delta, 1.0)
        carried, ones = (update(each, key, nothing, gate, delta, 1.0) for each in (carried, ones))
        error = (carried + factor * magnitude + count * (relative * magnitude + absolute * ones)) * EVALUATION
        largest = (np.abs(after.matrix) + error).max()
        bounds.append(error if largest < LARGEST[config["matrix_dtype"]] else np.full(error.shape, np.inf))
    return bounds


def product_and_bound(layer: LayerState, query: NDArray) -> tuple[NDArray, NDArray]:
    """The read-out of queries, and its bound: the error of the matrix, and the rounding of a sum over key_dim."""
    query = query.astype(np.float64)
    with np.errstate(all="ignore"):
        want = np.einsum("nhk,hkv->nhv", query, layer.matrix)
        most = np.einsum("nhk,hkv->nhv", np.abs(query), np.abs(layer.matrix) + layer.error)
        carried = np.einsum("nhk,hkv->nhv", np.abs(query), layer.error)
        whole = not layer.error.any() and all((each == np.round(each)).all() for each in (query, layer.matrix))
        bound = 0 * most if whole and most.max(initial=0) <= 2**24 else carried + (query.shape[-1] + 2) * U * most
    return want, bound * EVALUATION


def make_tokens(
    rng: np.random.Generator, config: Mapping[str, Any], *shape: int, kind: str = "real", dtype: str = "float32"
) -> Tokens:
    """Tokens [*shape, num_heads, ...], exact in `dtype`. All inputs are different, and no value is 0.

    kind: "real": normal keys of length at most 1, values and gates; "whole": tokens of RECUR-02 (c), with small integers as
    values and inputs.
    """
    shape = (*shape, config["num_heads"])
    whole = kind == "whole"
    sizes = {name: (*shape, config[width]) for name, width in PARTS.items() if width}
    inputs = rng.permutation(np.prod(sizes["inputs"], dtype=int)).reshape(sizes["inputs"]) % 251 + 1.0
    keys, values = rng.normal(size=sizes["keys"]), rng.normal(size=sizes["values"])
    gates = np.stack([rng.uniform(0.5, 1.0, shape), rng.uniform(0.25, 1.0, shape)], axis=-1)
    if whole:
        keys = np.eye(config["key_dim"])[rng.integers(config["key_dim"], size=shape)]
        values = rng.integers(1, 5, sizes["values"]) * rng.choice((-1, 1), sizes["values"])
        gates = np.stack([np.ones(shape), rng.choice((1, 1, 1, 0), shape)], axis=-1)
    else:
        inputs, keys = (
            inputs + rng.normal(size=inputs.shape),
            keys / np.maximum(1, np.linalg.norm(keys, axis=-1, keepdims=True) * 1.01),
        )
    arrays = {"inputs": inputs, "keys": keys, "values": values, "gates": gates}
    return {name: round_to(each.astype(np.float32), dtype) for name, each in arrays.items()}
