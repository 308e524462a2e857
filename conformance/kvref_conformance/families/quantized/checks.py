"""Checks of QUANT: tokens that are quantized when they are appended."""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import equal, pair, raises, reads, same, true, within
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, formats_of, held, new, pair_of_tokens
from kvref_conformance.checking.streams import Stream, filled
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.quantized.stream import QuantizedStream, formats_of_tokens
from kvref_conformance.families.rows.handed import formats_of_rows, widths
from kvref_conformance.oracle.formats import AFFINE, IN_GROUPS, SYMMETRIC
from kvref_conformance.oracle.rows import read_as
from kvref_conformance.outcome import NotOffered

Pair = tuple[NDArray, NDArray]
LOUD, QUIET = np.float32(2.0**8), np.float32(2.0**-8)  # factors


def reads_back(stream: Stream, keys: NDArray, values: NDArray, what: str) -> None:
    reads(stream.subject, stream.read(), stream.expected(keys, values), what, stream.config["format"])


def lengths(cache: Handle) -> list[int]:
    """Returns the length of every layer."""
    return [cache.length(layer) for layer in range(cache.config["num_layers"])]


def layer_is(subject: Subject, cache: Handle, layer: int, steps: Sequence[Pair], when: str) -> None:
    """Raises Broken unless a layer contains exactly the tokens of these steps."""
    want = [read_as(np.stack([step[which][layer] for step in steps]), cache.config["format"]) for which in (0, 1)]
    got = cache.read_tokens(layer, list(range(len(steps))))
    reads(subject, got, (want[0], want[1]), f"layer {layer} {when}")


@check("QUANT-01a", "quantized")
def an_append_goes_to_one_layer(subject: Subject) -> None:
    subject.need(num_layers=2)
    for name in formats_of_tokens(subject):
        stream, keys, values = filled(QuantizedStream(subject, format=name), 3)
        equal(lengths(stream.cache)[:2], [3, 0], "lengths of layers 0 and 1 after an append of 3 tokens to layer 0")
        reads_back(stream, keys, values, f"3 {name} tokens")


@check("QUANT-01a", "quantized")
def tokens_that_do_not_all_fit_are_not_appended(subject: Subject) -> None:
    for name in formats_of_tokens(subject):
        stream, keys, values = filled(QuantizedStream(subject, format=name), 3)
        before = lengths(stream.cache)
        with raises("CapacityExceeded"):
            stream.give(*pair_of_tokens(subject, stream.config["capacity"] - 2))  # one token too many
        equal(lengths(stream.cache), before, "lengths after CapacityExceeded")
        reads_back(stream, keys, values, f"3 {name} tokens after CapacityExceeded")


@check("QUANT-01b", "quantized")
def a_step_appends_to_every_layer(subject: Subject) -> None:
    cache = new(subject, "quantized")
    at_least(cache, capacity=3)
    layers = cache.config["num_layers"]
    steps = [pair_of_tokens(subject, layers) for _ in range(3)]
    for keys, values in steps:
        cache.append_step(keys, values)
    equal(lengths(cache), [3] * layers, "lengths after 3 steps")
    for layer in range(layers):
        layer_is(subject, cache, layer, steps, "after 3 steps")
    with raises("ShapeMismatch"):
        cache.append_step(*pair_of_tokens(subject, layers + 1))
    equal(lengths(cache), [3] * layers, "lengths after a rejected step with one layer too many")


@check("QUANT-02", "quantized")
def a_full_layer_raises(subject: Subject) -> None:
    stream = QuantizedStream(subject, capacity=4)
    _, keys, values = filled(stream, stream.config["capacity"])
    with raises("CapacityExceeded"):
        stream.give(*pair_of_tokens(subject, 1))
    reads_back(stream, keys, values, "a full layer after a rejected append")


@check("QUANT-03", "quantized")
def heads_have_scales_of_their_own(subject: Subject) -> None:
    subject.need(num_kv_heads=2)
    for name in formats_of_tokens(subject):
        stream, (keys, values) = QuantizedStream(subject, format=name), pair_of_tokens(subject, 3)
        keys[:, 0] *= LOUD
        values[:, 1] = held(subject, values[:, 1] * QUIET)
        stream.append(keys, values)
        reads_back(stream, keys, values, f"{name} tokens with one head of large values")


@check("QUANT-04", "quantized")
def every_way_of_reading_agrees(subject: Subject) -> None:
    positions = [4, 0, 2]
    for name in formats_of_tokens(subject):
        stream, _, _ = filled(QuantizedStream(subject, format=name), 5)
        seen = {}
        for way in (many_tokens, each_token, each_head):
            try:
                seen[way.__name__.replace("_", " ")] = way(stream.cache, positions)
            except NotOffered as lacking:
                missing = lacking
        if len(seen) < 2:
            raise NotOffered(f"two read operations ({missing})")
        first, *others = seen
        for other in others:
            pair(seen[other], seen[first], f"tokens {positions} read by {other}, compared with {first}")


def many_tokens(cache: Handle, positions: Sequence[int]) -> Pair:
    keys, values = cache.read_tokens(0, positions)
    return keys, values


def each_token(cache: Handle, positions: Sequence[int]) -> Pair:
    return _stacked([cache.read_token(0, position) for position in positions])


def each_head(cache: Handle, positions: Sequence[int]) -> Pair:
    heads = range(cache.config["num_kv_heads"])
    return _stacked([_stacked([cache.read_head(0, position, head) for head in heads]) for position in positions])


def _stacked(pairs: Sequence[Pair]) -> Pair:
    return np.stack([keys for keys, _ in pairs]), np.stack([values for _, values in pairs])


@check("QUANT-05", "quantized")
def a_token_is_quantized_once(subject: Subject) -> None:
    for name in formats_of_tokens(subject):
        stream, keys, values = filled(QuantizedStream(subject, format=name), 2)
        first = stream.cache.read_tokens(0, [0, 1])
        for _ in range(6):
            stream.append(*(part * np.float32(64) for part in pair_of_tokens(subject, 1)))
            pair(stream.cache.read_tokens(0, [0, 1]), first, f"the first two {name} tokens, read again after another append")
        reads(subject, first, stream.expected(keys, values), f"the first two {name} tokens")


@check("QUANT-06", "quantized")
def keys_and_values_have_scales_of_their_own(subject: Subject) -> None:
    for name in formats_of_tokens(subject):
        stream, (keys, values) = QuantizedStream(subject, format=name), pair_of_tokens(subject, 3)
        keys, values = keys * LOUD, held(subject, values * QUIET)
        stream.append(keys, values)
        reads_back(stream, keys, values, f"{name} tokens with large keys and small values")


@check("QUANT-07", "quantized")
def memory_is_codes_and_scales_over_capacity(subject: Subject) -> None:
    for name in formats_of(subject, "format", *SYMMETRIC):
        for capacity, layers in ((20, 2), (7, 3)):
            stream = QuantizedStream(subject, format=name, capacity=capacity, num_layers=layers)
            sizes_are_right(stream)
            with suppress(NotOffered):
                stream.cache.append_step(*pair_of_tokens(subject, stream.config["num_layers"]))
            sizes_are_right(stream)


def sizes_are_right(stream: QuantizedStream) -> None:
    """Checks the sizes that the implementation provides. Raises NotOffered if it provides none."""
    layers, capacity, heads, dim = (stream.config[name] for name in ("num_layers", "capacity", "num_kv_heads", "head_dim"))
    stored, plain = layers * capacity * heads * 2 * (dim + 4), layers * capacity * heads * 2 * dim * 4
    seen = dict(stream.attributes("memory_bytes", "fp32_bytes", "compression_ratio"))
    if not seen:
        raise NotOffered("memory_bytes, fp32_bytes and compression_ratio")
    ratio = seen.pop("compression_ratio", plain / stored)
    equal(seen, {name: {"memory_bytes": stored, "fp32_bytes": plain}[name] for name in seen}, "sizes in bytes")
    true(abs(ratio - plain / stored) < 1e-6, "compression_ratio", f"{plain / stored}", ratio)
    true(ratio < 4, "compression_ratio", "below 4", ratio)


@check("QUANT-08", "quantized")
def clear_empties_every_layer(subject: Subject) -> None:
    cache = new(subject, "quantized", capacity=4)
    layers = cache.config["num_layers"]
    for _ in range(cache.config["capacity"]):
        cache.append_step(*pair_of_tokens(subject, layers))
    cache.clear()
    equal(lengths(cache), [0] * layers, "lengths after clear")
    for layer in range(layers):
        with raises("PositionOutOfRange"):
            cache.read_token(layer, 0)
    step = pair_of_tokens(subject, layers)
    cache.append_step(*step)
    for layer in range(layers):
        layer_is(subject, cache, layer, [step], "after clear and a step")


@check("QUANT-09", "rows")
def the_mean_absolute_error_is_one(subject: Subject) -> None:
    family = subject.new("rows")
    for name in formats_of_rows(subject, *SYMMETRIC, *AFFINE, *IN_GROUPS):
        for count, wanted in ((1, 1), (3, 7), (40, 16)):
            rows = held(subject, subject.rng.normal(size=(count, *widths(subject, wanted, format=name))))
            read = read_as(rows, name)
            want = np.abs(rows.astype(np.float64) - read.values).mean()
            # float32 differences and their sum in any order: each term rounds at most size + 2 times.
            bound = want * (rows.size + 2) * 2.0**-23
            bound += read.slack.mean() if subject.level == "tolerant" else 0
            within(family.mean_absolute_error(rows, name), want, bound, f"mean absolute error of {name} rows")
        none = np.zeros((0, *widths(subject, 4, format=name)), np.float32)
        same(family.mean_absolute_error(none, name), np.float32(0), f"mean absolute error of 0 {name} rows")
