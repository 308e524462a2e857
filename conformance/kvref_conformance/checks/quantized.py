"""QUANT: tokens quantized as they are appended."""

from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import equal, pair, raises, reads, same, true, within
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import DIM, HEADS, new, pair_of_tokens
from kvref_conformance.drivers.in_process import Handle, Subject
from kvref_conformance.oracle.rows import read_as

FORMATS = ("int8", "float8_e4m3fn", "float8_e5m2")


def filled(subject: Subject, count: int, **config: Any) -> tuple[Handle, NDArray, NDArray]:
    """A cache whose layer 0 has `count` tokens."""
    cache, (keys, values) = new(subject, "quantized", **config), pair_of_tokens(subject, count)
    cache.append(0, keys, values)
    return cache, keys, values


def reads_as(subject: Subject, cache: Handle, keys: NDArray, values: NDArray, format: str, what: str) -> None:
    got = cache.read_tokens(0, list(range(len(keys))))
    reads(subject, got, (read_as(keys, format), read_as(values, format)), what)


@check("QUANT-01", "quantized")
def an_append_goes_to_one_layer(subject: Subject) -> None:
    for name in subject.formats(*FORMATS):
        cache, keys, values = filled(subject, 3, format=name)
        equal((cache.length(0), cache.length(1)), (3, 0), "lengths after 3 tokens for layer 0")
        with raises("CapacityExceeded"):
            cache.append(0, *pair_of_tokens(subject, 18))  # 17 would fit
        equal((cache.length(0), cache.length(1)), (3, 0), "lengths after 18 tokens that did not fit")
        reads_as(subject, cache, keys, values, name, f"3 {name} tokens")


@check("QUANT-01", "quantized")
def a_step_appends_to_every_layer(subject: Subject) -> None:
    cache, steps = new(subject, "quantized"), [pair_of_tokens(subject, 2) for _ in range(3)]
    for keys, values in steps:
        cache.append_step(keys, values)
    for layer in (0, 1):
        equal(cache.length(layer), 3, f"length of layer {layer} after 3 steps")
        want = [read_as(np.stack([step[which][layer] for step in steps]), "int8") for which in (0, 1)]
        reads(subject, cache.read_tokens(layer, [0, 1, 2]), (want[0], want[1]), f"layer {layer}")
    with raises("ShapeMismatch"):
        cache.append_step(*pair_of_tokens(subject, 3))
    equal((cache.length(0), cache.length(1)), (3, 3), "lengths after a step of 3 layers was refused")


@check("QUANT-02", "quantized")
def a_full_layer_raises(subject: Subject) -> None:
    cache, keys, values = filled(subject, 4, capacity=4)
    with raises("CapacityExceeded"):
        cache.append(0, keys[:1], values[:1])
    reads_as(subject, cache, keys, values, "int8", "a full layer after one token more was refused")


@check("QUANT-03", "quantized")
def heads_have_scales_of_their_own(subject: Subject) -> None:
    for name in subject.formats(*FORMATS):
        cache, (keys, values) = new(subject, "quantized", format=name), pair_of_tokens(subject, 3)
        keys[:, 0] *= 1000
        values[:, 1] *= 1e-3
        cache.append(0, keys, values)
        reads_as(subject, cache, keys, values, name, f"{name} tokens with one loud head")


@check("QUANT-04", "quantized")
def every_way_of_reading_agrees(subject: Subject) -> None:
    for name in subject.formats(*FORMATS):
        cache, _, _ = filled(subject, 5, format=name)
        many = cache.read_tokens(0, [4, 0, 2])
        for row, position in enumerate((4, 0, 2)):
            token = cache.read_token(0, position)
            pair(token, (many[0][row], many[1][row]), f"token {position} read alone")
            for head in range(HEADS):
                pair(cache.read_head(0, position, head), (token[0][head], token[1][head]), f"head {head} of token {position}")


@check("QUANT-05", "quantized")
def a_token_is_quantized_once(subject: Subject) -> None:
    for name in subject.formats(*FORMATS):
        cache, keys, values = filled(subject, 2, format=name)
        first = cache.read_tokens(0, [0, 1])
        for _ in range(6):
            cache.append(0, *(part * 50 for part in pair_of_tokens(subject, 1)))
            pair(cache.read_tokens(0, [0, 1]), first, f"the first two {name} tokens, read again after an append")
        reads(subject, first, (read_as(keys, name), read_as(values, name)), f"the first two {name} tokens")


@check("QUANT-06", "quantized")
def keys_and_values_have_scales_of_their_own(subject: Subject) -> None:
    for name in subject.formats(*FORMATS):
        cache, (keys, values) = new(subject, "quantized", format=name), pair_of_tokens(subject, 3)
        keys, values = keys * 100, values / 100
        cache.append(0, keys, values)
        reads_as(subject, cache, keys, values, name, f"{name} tokens with large keys and small values")


@check("QUANT-07", "quantized")
def memory_is_codes_and_scales_over_capacity(subject: Subject) -> None:
    for name in subject.formats(*FORMATS):
        for capacity, layers in ((20, 2), (7, 3)):
            cache = new(subject, "quantized", format=name, capacity=capacity, num_layers=layers)
            stored = layers * capacity * HEADS * 2 * (DIM + 4)
            plain = layers * capacity * HEADS * 2 * DIM * 4
            for _ in range(2):
                equal((cache.memory_bytes, cache.fp32_bytes), (stored, plain), "bytes stored, and as float32")
                true(abs(cache.compression_ratio - plain / stored) < 1e-6, "ratio", f"{plain / stored}", cache.compression_ratio)
                true(cache.compression_ratio < 4, "ratio", "below 4", cache.compression_ratio)
                cache.append_step(*pair_of_tokens(subject, layers))


@check("QUANT-08", "quantized")
def clear_empties_every_layer(subject: Subject) -> None:
    cache = new(subject, "quantized", capacity=4)
    for _ in range(4):
        cache.append_step(*pair_of_tokens(subject, 2))
    cache.clear()
    equal((cache.length(0), cache.length(1)), (0, 0), "lengths after clear")
    for layer in (0, 1):
        with raises("PositionOutOfRange"):
            cache.read_token(layer, 0)
    keys, values = pair_of_tokens(subject, 4)
    cache.append(0, keys, values)
    reads_as(subject, cache, keys, values, "int8", "tokens appended after clear")


@check("QUANT-09", "rows")
def the_mean_absolute_error_is_one(subject: Subject) -> None:
    family = subject.new("rows")
    for name in subject.formats(*FORMATS, "q8", "q4"):
        for shape in ((1, 1), (3, 7), (40, 16)):
            rows = subject.rng.normal(size=shape).astype(np.float32)
            read = read_as(rows, name)
            want = np.abs(rows.astype(np.float64) - read.values).mean()
            # float32 differences and their sum in any order: each term rounds at most size + 2 times.
            bound = want * (rows.size + 2) * 2.0**-23
            bound += read.slack.mean() if subject.level == "tolerant" else 0
            within(family.mean_absolute_error(rows, name), want, bound, f"error of {name} rows")
        same(family.mean_absolute_error(np.zeros((0, 4), np.float32), name), np.float32(0), f"error of no {name} rows")
