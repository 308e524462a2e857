"""Checks of QUANT: tokens that are quantized when they are appended."""

from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.quantized.law_adapter import QuantizedLawAdapter, formats_in_groups, formats_of_tokens
from kvref_conformance.families.rows.input_rows import formats_of_rows, widths
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import AFFINE, IN_GROUPS, ROTATED, STATIC, SYMMETRIC, group_of
from kvref_conformance.oracle.formats.hadamard_rotation import block_of
from kvref_conformance.oracle.formats.per_row import read_as
from kvref_conformance.oracle.token_storage import row_bytes
from kvref_conformance.outcome import NotOffered
from kvref_conformance.testlib.assertions import (
    assert_equal,
    assert_pair,
    assert_same,
    assert_within,
    default_scale,
    expected_attention,
    normal,
    queries,
    raises,
    reads,
    true,
)
from kvref_conformance.testlib.fixtures import (
    at_least,
    construct,
    formats_of,
    new,
    pair_of_tokens,
    refused,
    round_to_input_dtype,
    supports,
)
from kvref_conformance.testlib.integer_types import Seen, TypedIntegers, the_same_in_any_type
from kvref_conformance.testlib.law_adapter import MANY_TOKENS, LawAdapter, filled
from kvref_conformance.testlib.production_sizes import affordable, edges
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.tagged_content import WrittenContent, belongs, pair_of_content

Pair = tuple[NDArray, NDArray]
LOUD, QUIET = np.float32(2.0**8), np.float32(2.0**-8)  # factors


def reads_back(stream: LawAdapter, keys: NDArray, values: NDArray, what: str) -> None:
    reads(stream.subject, stream.read(), stream.expected(keys, values), what, stream.config["format"])


def lengths(cache: ObjectProxy) -> list[int]:
    """Returns the length of every layer."""
    return [cache.length(layer) for layer in range(cache.config["num_layers"])]


def layer_is(subject: Subject, cache: ObjectProxy, layer: int, steps: Sequence[Pair], when: str) -> None:
    """Raises Broken unless a layer contains exactly the tokens of these steps."""
    want = [read_as(np.stack([step[which][layer] for step in steps]), cache.config["format"]) for which in (0, 1)]
    got = cache.read_tokens(layer, list(range(len(steps))))
    reads(subject, got, (want[0], want[1]), f"layer {layer} {when}")


@check("QUANT-01a", "quantized")
def an_append_goes_to_one_layer(subject: Subject) -> None:
    subject.need(num_layers=2)
    for name in formats_of_tokens(subject):
        stream, keys, values = filled(QuantizedLawAdapter(subject, format=name), 3)
        assert_equal(lengths(stream.cache)[:2], [3, 0], "lengths of layers 0 and 1 after an append of 3 tokens to layer 0")
        reads_back(stream, keys, values, f"3 {name} tokens")


@check("QUANT-01a", "quantized")
def tokens_that_do_not_all_fit_are_not_appended(subject: Subject) -> None:
    for name in formats_of_tokens(subject):
        stream, keys, values = filled(QuantizedLawAdapter(subject, format=name), 3)
        before = lengths(stream.cache)
        with raises("CapacityExceeded"):
            stream.give(*pair_of_tokens(subject, stream.config["capacity"] - 2))  # one token too many
        assert_equal(lengths(stream.cache), before, "lengths after CapacityExceeded")
        reads_back(stream, keys, values, f"3 {name} tokens after CapacityExceeded")


@check("QUANT-01b", "quantized")
def a_step_appends_to_every_layer(subject: Subject) -> None:
    cache = new(subject, "quantized")
    at_least(cache, capacity=3)
    layers = cache.config["num_layers"]
    steps = [pair_of_tokens(subject, layers) for _ in range(3)]
    for keys, values in steps:
        cache.append_step(keys, values)
    assert_equal(lengths(cache), [3] * layers, "lengths after 3 steps")
    for layer in range(layers):
        layer_is(subject, cache, layer, steps, "after 3 steps")
    with raises("ShapeMismatch"):
        cache.append_step(*pair_of_tokens(subject, layers + 1))
    assert_equal(lengths(cache), [3] * layers, "lengths after a rejected step with one layer too many")


@check("QUANT-02", "quantized")
def a_full_layer_raises(subject: Subject) -> None:
    stream = QuantizedLawAdapter(subject, capacity=4)
    _, keys, values = filled(stream, stream.config["capacity"])
    with raises("CapacityExceeded"):
        stream.give(*pair_of_tokens(subject, 1))
    reads_back(stream, keys, values, "a full layer after a rejected append")


@check("QUANT-03", "quantized")
def heads_have_scales_of_their_own(subject: Subject) -> None:
    subject.need(num_kv_heads=2)
    for name in formats_of_tokens(subject):
        stream, (keys, values) = QuantizedLawAdapter(subject, format=name), pair_of_tokens(subject, 3)
        keys[:, 0] *= LOUD
        values[:, 1] = round_to_input_dtype(subject, values[:, 1] * QUIET)
        stream.append(keys, values)
        reads_back(stream, keys, values, f"{name} tokens with one head of large values")


@check("QUANT-04", "quantized")
def every_way_of_reading_agrees(subject: Subject) -> None:
    positions = [4, 0, 2]
    for name in formats_of_tokens(subject):
        stream, _, _ = filled(QuantizedLawAdapter(subject, format=name), 5)
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
            assert_pair(seen[other], seen[first], f"tokens {positions} read by {other}, compared with {first}")


def many_tokens(cache: ObjectProxy, positions: Sequence[int]) -> Pair:
    keys, values = cache.read_tokens(0, positions)
    return keys, values


def each_token(cache: ObjectProxy, positions: Sequence[int]) -> Pair:
    return _stacked([cache.read_token(0, position) for position in positions])


def each_head(cache: ObjectProxy, positions: Sequence[int]) -> Pair:
    heads = range(cache.config["num_kv_heads"])
    return _stacked([_stacked([cache.read_head(0, position, head) for head in heads]) for position in positions])


def _stacked(pairs: Sequence[Pair]) -> Pair:
    return np.stack([keys for keys, _ in pairs]), np.stack([values for _, values in pairs])


@check("QUANT-05", "quantized")
def a_token_is_quantized_once(subject: Subject) -> None:
    for name in formats_of_tokens(subject):
        stream, keys, values = filled(QuantizedLawAdapter(subject, format=name), 2)
        first = stream.cache.read_tokens(0, [0, 1])
        for _ in range(6):
            stream.append(*(part * np.float32(64) for part in pair_of_tokens(subject, 1)))
            assert_pair(
                stream.cache.read_tokens(0, [0, 1]), first, f"the first two {name} tokens, read again after another append"
            )
        reads(subject, first, stream.expected(keys, values), f"the first two {name} tokens")


@check("QUANT-06", "quantized")
def keys_and_values_have_scales_of_their_own(subject: Subject) -> None:
    for name in formats_of_tokens(subject):
        stream, (keys, values) = QuantizedLawAdapter(subject, format=name), pair_of_tokens(subject, 3)
        keys, values = keys * LOUD, round_to_input_dtype(subject, values * QUIET)
        stream.append(keys, values)
        reads_back(stream, keys, values, f"{name} tokens with large keys and small values")


@check("QUANT-07", "quantized")
def memory_is_codes_and_scales_over_capacity(subject: Subject) -> None:
    for name in formats_of(subject, "format", *SYMMETRIC):
        for capacity, layers in ((20, 2), (7, 3)):
            stream = QuantizedLawAdapter(subject, format=name, capacity=capacity, num_layers=layers)
            sizes_are_right(stream)
            with suppress(NotOffered):
                stream.cache.append_step(*pair_of_tokens(subject, stream.config["num_layers"]))
            sizes_are_right(stream)


def sizes_are_right(stream: QuantizedLawAdapter) -> None:
    """Checks the sizes that the implementation provides. Raises NotOffered if it provides none."""
    layers, capacity, heads, dim = (stream.config[name] for name in ("num_layers", "capacity", "num_kv_heads", "head_dim"))
    stored, plain = layers * capacity * heads * 2 * (dim + 4), layers * capacity * heads * 2 * dim * 4
    seen = dict(stream.attributes("memory_bytes", "fp32_bytes", "compression_ratio"))
    if not seen:
        raise NotOffered("memory_bytes, fp32_bytes and compression_ratio")
    ratio = seen.pop("compression_ratio", plain / stored)
    assert_equal(seen, {name: {"memory_bytes": stored, "fp32_bytes": plain}[name] for name in seen}, "sizes in bytes")
    true(abs(ratio - plain / stored) < 1e-6, "compression_ratio", f"{plain / stored}", ratio)
    true(ratio < 4, "compression_ratio", "below 4", ratio)


@check("QUANT-08", "quantized")
def clear_empties_every_layer(subject: Subject) -> None:
    cache = new(subject, "quantized", capacity=4)
    layers = cache.config["num_layers"]
    for _ in range(cache.config["capacity"]):
        cache.append_step(*pair_of_tokens(subject, layers))
    cache.clear()
    assert_equal(lengths(cache), [0] * layers, "lengths after clear")
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
            rows = round_to_input_dtype(subject, subject.rng.normal(size=(count, *widths(subject, wanted, format=name))))
            read = read_as(rows, name)
            want = np.abs(rows.astype(np.float64) - read.values).mean()
            # float32 differences and their sum in any order: each term rounds at most size + 2 times.
            bound = want * (rows.size + 2) * 2.0**-23
            bound += read.slack.mean() if subject.level == "tolerant" else 0
            assert_within(family.mean_absolute_error(rows, name), want, bound, f"mean absolute error of {name} rows")
        none = np.zeros((0, *widths(subject, 4, format=name)), np.float32)
        assert_same(family.mean_absolute_error(none, name), np.float32(0), f"mean absolute error of 0 {name} rows")


# Checks of ATTN-10: attention over the values that the cache reads as.


@check("ATTN-10", "quantized")
def attention_over_codes_is_over_what_they_read_as(subject: Subject) -> None:
    for name in formats_of_tokens(subject):
        cache = new(subject, "quantized", format=name)
        at_least(cache, capacity=7)
        layers = cache.config["num_layers"]
        for _ in range(7):
            cache.append_step(*pair_of_tokens(subject, layers))
        query = queries(subject, 1)
        want, bound = expected_attention(
            subject, query, *cache.read_tokens(layers - 1, list(range(7))), scale=default_scale(subject)
        )
        assert_within(cache.attend(layers - 1, query, default_scale(subject)), want, bound, f"attention over {name} tokens")


# Checks of EDIT for the quantized cache: `truncate` of every layer.


def step(subject: Subject, layers: int, loud: float = 1.0) -> Pair:
    """Returns one token per layer."""
    keys, values = (round_to_input_dtype(subject, part * loud) for part in pair_of_tokens(subject, layers))
    return keys, values


def cache_and_steps(subject: Subject, count: int, **config: str) -> tuple[ObjectProxy, list[Pair]]:
    """Returns a cache after `count` steps, and the steps."""
    cache = new(subject, "quantized", **config)
    at_least(cache, capacity=count)
    steps = [step(subject, cache.config["num_layers"]) for _ in range(count)]
    given(cache, steps)
    return cache, steps


def given(cache: ObjectProxy, steps: list[Pair]) -> None:
    for each in steps:
        cache.append_step(*each)


def held_by(cache: ObjectProxy, count: int) -> list[Pair]:
    """Returns the first `count` tokens that each layer reads as."""
    return [cache.read_tokens(layer, list(range(count))) for layer in range(cache.config["num_layers"] if count else 0)]


def holds(cache: ObjectProxy, want: list[Pair], count: int, when: str) -> None:
    """Raises Broken unless every layer has `count` tokens and reads as `want`."""
    assert_equal(lengths(cache), [count] * cache.config["num_layers"], f"lengths {when}")
    for layer, read in enumerate(held_by(cache, count)):
        assert_pair(read, want[layer], f"layer {layer} {when}")


@check("EDIT-01ac", "quantized")
def the_first_tokens_of_every_layer_stay(subject: Subject) -> None:
    for name in formats_of_tokens(subject):
        cache, _ = cache_and_steps(subject, 7, format=name)
        for length in (6, 3, 0):
            before = held_by(cache, length)
            cache.truncate(length)
            holds(cache, before, length, f"of a {name} cache after truncate({length}), compared with before")


@check("EDIT-01bc", "quantized")
def what_went_cannot_be_read(subject: Subject) -> None:
    cache, _ = cache_and_steps(subject, 5)
    for length in (3, 0):
        cache.truncate(length)
        for layer in range(cache.config["num_layers"]):
            for position in (length, 4):
                with raises("PositionOutOfRange"):
                    cache.read_token(layer, position)


@check("EDIT-01a", "quantized")
def layers_of_any_length_are_cut_to_one(subject: Subject) -> None:
    subject.need(num_layers=2)
    for longer in (0, 1):
        cache, _ = cache_and_steps(subject, 4)
        at_least(cache, capacity=7)
        cache.append(longer, *pair_of_tokens(subject, 3))
        before = held_by(cache, 3)
        cache.truncate(3)
        holds(cache, before, 3, f"after truncate(3) of 4 tokens and 7 in layer {longer}")


@check("EDIT-02ab", "quantized")
def no_more_tokens_stay_than_there_are(subject: Subject) -> None:
    cache, _ = cache_and_steps(subject, 5)
    capacity, before = cache.config["capacity"], held_by(cache, 5)
    for length in subject.integers(6, max(6, capacity), capacity + 1, -1, -5, -6):
        with raises("PositionOutOfRange"):
            cache.truncate(length)
        holds(cache, before, 5, f"after a rejected truncate({length}) of 5 tokens")
    cache.truncate(5)
    holds(cache, before, 5, "after truncate(5) of 5 tokens")


@check("EDIT-02a", "quantized")
def the_shortest_layer_says_how_many_may_stay(subject: Subject) -> None:
    subject.need(num_layers=2)
    for longer in (0, 1):
        cache, _ = cache_and_steps(subject, 2)
        at_least(cache, capacity=5)
        cache.append(longer, *pair_of_tokens(subject, 3))
        before = lengths(cache)
        with raises("PositionOutOfRange"):
            cache.truncate(3)
        assert_equal(lengths(cache), before, f"lengths after a rejected truncate(3) of 2 tokens and 5 in layer {longer}")


@check("EDIT-03", "quantized")
def what_follows_is_as_if_nothing_had_gone(subject: Subject) -> None:
    """The removed tokens are larger, or smaller, than all others."""
    for name in formats_of_tokens(subject):
        for loud in (float(LOUD), float(QUIET)):
            cache, steps = cache_and_steps(subject, 4, format=name)
            at_least(cache, capacity=8)
            layers = cache.config["num_layers"]
            for draft, length, more in ((2, 4, 1), (1, 2, 3), (3, 0, 2), (2, 3, 1)):  # the last removes one older token
                drafted = [step(subject, layers, loud) for _ in range(draft)]
                given(cache, drafted)
                cache.truncate(length)
                steps = (steps + drafted)[:length] + [step(subject, layers) for _ in range(more)]
                given(cache, steps[length:])
                when = f"of a {name} cache after a draft of {draft}, truncate({length}) and {more} steps"
                holds(cache, never(subject, cache, steps), len(steps), f"{when}, compared with a cache without the draft")


def never(subject: Subject, cache: ObjectProxy, steps: list[Pair]) -> list[Pair]:
    """Returns what a new cache of the same sizes reads as after these steps."""
    other = construct(subject, "quantized", **cache.config)
    given(other, steps)
    return held_by(other, len(steps))


@check("EDIT-03", "quantized")
def a_full_cache_that_went_back_is_filled_again(subject: Subject) -> None:
    cache = new(subject, "quantized", capacity=4)
    layers, capacity = cache.config["num_layers"], cache.config["capacity"]
    steps = [step(subject, layers) for _ in range(2 * capacity - 1)]
    given(cache, steps[:capacity])
    cache.truncate(1)
    steps = steps[:1] + steps[capacity:]
    given(cache, steps[1:])
    holds(cache, never(subject, cache, steps), capacity, "of a full cache after truncate(1) and steps until it is full again")
    with raises("CapacityExceeded"):
        given(cache, [step(subject, layers)])


# Checks of QUANT-10: a cache in formats of groups.


def four_tokens(subject: Subject, format: str) -> tuple[QuantizedLawAdapter, NDArray, NDArray]:
    """Returns a cache with two groups per row and 4 tokens, and the tokens."""
    stream = QuantizedLawAdapter(subject, num_layers=1, format=format, head_dim=2 * group_of(format))
    at_least(stream.cache, capacity=4)
    keys, values = pair_of_tokens(subject, 4, stream.config["num_kv_heads"], stream.config["head_dim"])
    stream.give(keys, values)
    return stream, keys, values


@check("QUANT-10a", "quantized")
def tokens_read_back_as_their_format_says(subject: Subject) -> None:
    for name in formats_in_groups(subject):
        stream, keys, values = four_tokens(subject, name)
        reads_back(stream, keys, values, f"4 {name} tokens")


@check("QUANT-10b", "quantized")
def codes_and_scales_go_and_come_together(subject: Subject) -> None:
    for name in formats_in_groups(subject):
        stream, keys, values = four_tokens(subject, name)
        stream.cache.truncate(2)
        keys[2:], values[2:] = pair_of_tokens(subject, 2, *keys.shape[1:])  # with other magnitudes
        stream.give(keys[2:], values[2:])
        reads_back(stream, keys, values, f"{name} tokens, two of which replace truncated ones")
        stream.cache.clear()
        stream.give(values, keys)
        reads_back(stream, values, keys, f"{name} tokens after clear and append")


@check("QUANT-10c", "quantized")
def memory_is_what_the_format_stores(subject: Subject) -> None:
    for name in formats_in_groups(subject):
        cache = new(subject, "quantized", format=name, head_dim=2 * group_of(name))
        rows = 2 * cache.config["num_layers"] * cache.config["capacity"] * cache.config["num_kv_heads"]
        assert_equal(cache.memory_bytes, rows * row_bytes(cache.config["head_dim"], name), f"memory_bytes in {name}")


@check("QUANT-10d", "quantized")
def a_head_dim_that_no_group_goes_into_is_refused(subject: Subject) -> None:
    tried = [
        (name, dim)
        for name in formats_in_groups(subject)
        for dim in (group_of(name) + 1, group_of(name) // 2)
        if supports(subject, "head_dim", dim)
    ]
    if not tried:
        raise NotOffered("a head_dim that is not a multiple of a group")
    for name, dim in tried:
        config = new(subject, "quantized", format=name, head_dim=group_of(name)).config
        with raises("ConfigError"):
            subject.new("quantized", **config | {"head_dim": dim})


# Checks of LAW-01, LAW-02, LAW-05, LAW-13 and LAW-20 for this family.


def cache_after_steps(subject: Subject, steps: int, **config: str) -> ObjectProxy:
    """Returns a cache after `steps` steps."""
    cache = new(subject, "quantized", **config)
    at_least(cache, capacity=steps)
    for _ in range(steps):
        cache.append_step(*pair_of_tokens(subject, cache.config["num_layers"]))
    return cache


@check("LAW-01", "quantized")
def a_step_goes_to_all_layers_or_none(subject: Subject) -> None:
    subject.need(num_layers=2)
    cache = new(subject, "quantized", capacity=2)
    layers, capacity = cache.config["num_layers"], cache.config["capacity"]
    cache.append(1, *pair_of_tokens(subject, capacity))
    with raises("CapacityExceeded"):
        cache.append_step(*pair_of_tokens(subject, layers))  # layer 1 is full, layer 0 is not
    assert_equal((cache.length(0), cache.length(1)), (0, capacity), "lengths after a step that raised CapacityExceeded")


@check("LAW-01", "quantized")
def tokens_go_to_a_layer_all_or_none(subject: Subject) -> None:
    stream, _, _ = filled(QuantizedLawAdapter(subject, capacity=4), 2)
    first = stream.read()
    with raises("CapacityExceeded"):
        stream.give(*pair_of_tokens(subject, stream.config["capacity"] - 1))  # one token too many
    assert_equal(len(stream), 2, "length after an append that raised CapacityExceeded")
    assert_pair(stream.read(), first, "tokens after an append that raised CapacityExceeded")


@check("LAW-20", "quantized")
def bytes_are_counted_whatever_the_sizes_are_given_in(subject: Subject) -> None:
    def script(typed: TypedIntegers) -> Iterator[Seen]:
        cache = typed.new("quantized", capacity=100)
        yield "memory_bytes and fp32_bytes", (cache.memory_bytes, cache.fp32_bytes)

    the_same_in_any_type(subject, script)


@check("LAW-20", "quantized")
def tokens_are_read_whatever_they_are_named_in(subject: Subject) -> None:
    sizes = new(subject, "quantized").config
    layer, head = int(sizes["num_layers"]) - 1, int(sizes["num_kv_heads"]) - 1
    steps = [pair_of_tokens(subject, sizes["num_layers"]) for _ in range(2)]

    def script(typed: TypedIntegers) -> Iterator[Seen]:
        cache = typed.new("quantized", capacity=100)
        at_least(cache, capacity=len(steps))
        for step in steps:
            cache.append_step(*step)
        yield f"length of layer {layer}", typed.call(cache, "length", layer)
        yield "tokens 1 and 0", typed.call(cache, "read_tokens", layer, [1, 0])
        yield f"head {head} of token 1", typed.call(cache, "read_head", layer, 1, head)

    the_same_in_any_type(subject, script)


@check("LAW-20", "quantized")
def tokens_are_appended_whatever_the_layer_is_named_in(subject: Subject) -> None:
    subject.need(num_layers=2)
    keys, values = pair_of_tokens(subject, 2)

    def script(typed: TypedIntegers) -> Iterator[Seen]:
        cache = typed.new("quantized", capacity=100)
        yield "append to layer 1", typed.call(cache, "append", 1, keys, values)
        yield "length of layer 1", typed.call(cache, "length", 1)
        yield "tokens 1 and 0", typed.call(cache, "read_tokens", 1, [1, 0])

    the_same_in_any_type(subject, script)


@check("LAW-05a", "quantized")
def a_token_never_appended_cannot_be_read(subject: Subject) -> None:
    for name in formats_of_tokens(subject):
        cache = cache_after_steps(subject, 3, format=name)
        for layer in range(cache.config["num_layers"]):
            with raises("PositionOutOfRange"):
                cache.read_token(layer, 3)


@check("LAW-05a", "quantized")
def a_token_that_was_cleared_cannot_be_read(subject: Subject) -> None:
    for name in formats_of_tokens(subject):
        cache = cache_after_steps(subject, 3, format=name)
        cache.clear()
        for layer in range(cache.config["num_layers"]):
            for position in (0, 2):
                with raises("PositionOutOfRange"):
                    cache.read_token(layer, position)
                with raises("PositionOutOfRange"):
                    cache.read_head(layer, position, 0)


@check("LAW-13b", "quantized")
def reading_no_positions_gives_no_tokens(subject: Subject) -> None:
    stream, _, _ = filled(QuantizedLawAdapter(subject))
    keys, values = stream.cache.read_tokens(0, [])
    assert_equal((len(keys), len(values)), (0, 0), "tokens read at 0 positions")


@check("LAW-02a", "quantized")
def layers_are_apart(subject: Subject) -> None:
    subject.need(num_layers=2)
    stream, keys, values = filled(QuantizedLawAdapter(subject))
    stream.cache.append(1, *pair_of_tokens(subject, 1))
    assert_equal(stream.cache.length(0), MANY_TOKENS, "length of layer 0 after an append to layer 1")
    reads(subject, stream.read(), stream.expected(keys, values), "layer 0 after an append to layer 1")


@check("LAW-20", "quantized")
def tokens_go_whatever_the_length_is_given_in(subject: Subject) -> None:
    keys, values = pair_of_tokens(subject, 110)

    def script(typed: TypedIntegers) -> Iterator[Seen]:
        cache = typed.new("quantized", num_layers=1, capacity=200)
        at_least(cache, capacity=200)
        cache.append(0, keys, values)
        for time in range(3):
            yield f"truncate(100), call {time + 1}", typed.call(cache, "truncate", 100)
            cache.append(0, keys[:60], values[:60])
            yield f"length after an append of 60, call {time + 1}", cache.length(0)
        yield "tokens 159 and 100", typed.call(cache, "read_tokens", 0, [159, 100])

    the_same_in_any_type(subject, script)


# Checks of LAW-18: rows and scales of the quantized cache at high positions of each layer.


@check("LAW-18", "quantized")
def layers_of_different_length_keep_their_scales(subject: Subject) -> None:
    for format in subject.formats("int8", "float8_e4m3fn", "float8_e5m2"):
        cache = new(subject, "quantized", num_layers=4, capacity=700, num_kv_heads=3, head_dim=96, format=format)
        written = WrittenContent(cache.config["num_kv_heads"], cache.config["head_dim"])
        lengths = [0] * cache.config["num_layers"]
        room = affordable(subject, cache.config["capacity"], 3 * len(lengths))
        for count in (1, 15, 1, 47, 64, 129, 400):
            for layer in range(len(lengths)):
                more = min(count // (layer + 1), room - lengths[layer])
                if not more:
                    continue
                given = pair_of_content(0, layer, range(lengths[layer], lengths[layer] + more), written.heads, written.dim)
                cache.append(layer, *given)
                lengths[layer] += more
                written.up_to(0, layer, lengths[layer])
        for layer, length in enumerate(lengths):
            every = sorted({p for p in (0, 16, 17, 64, 127, 128, 255, 256, 257, length - 1) if 0 <= p < length})
            given = pair_of_content(0, layer, every, written.heads, written.dim)
            wanted = read_as(given[0], format), read_as(given[1], format)
            belongs(cache.read_tokens(layer, every), 0, layer, every, written, subject.level == "exact", wanted)


@check("LAW-18", "quantized")
def drafts_come_and_go_at_any_length(subject: Subject) -> None:
    for format in subject.formats("int8", "float8_e4m3fn", "float8_e5m2"):
        cache = new(subject, "quantized", num_layers=3, capacity=600, num_kv_heads=3, head_dim=96, format=format)
        written, layers, at = (
            WrittenContent(cache.config["num_kv_heads"], cache.config["head_dim"]),
            cache.config["num_layers"],
            0,
        )
        ends = edges(affordable(subject, cache.config["capacity"], 2 * layers) - 5)
        for end in (*ends, *reversed(ends)):
            for layer in range(layers if end > at else 0):
                for stream, positions in ((0, range(at, end)), (1, range(end, end + 5))):
                    cache.append(layer, *pair_of_content(stream, layer, positions, written.heads, written.dim))
                    written.up_to(stream, layer, positions.stop)
            cache.truncate(end)
            for layer in range(layers):
                every = sorted({0, end // 2, max(0, end - 2), end - 1})
                given = pair_of_content(0, layer, every, written.heads, written.dim)
                wanted = read_as(given[0], format), read_as(given[1], format)
                belongs(cache.read_tokens(layer, every), 0, layer, every, written, subject.level == "exact", wanted)
            at = end


# Checks of FMT-ROT: a cache in rotated formats.

DIM = 64


def hadamard_streams(subject: Subject) -> Iterator[QuantizedLawAdapter]:
    """Yields a cache of one layer per rotated format. Raises NotOffered if no allowed head_dim has a block to rotate."""
    dim, found = subject.size("head_dim", DIM), formats_of(subject, "format", *ROTATED)
    found = [name for name in found if dim % group_of(name) == 0 and block_of(dim) > 1]
    if not found:
        raise NotOffered("a head_dim with a block to rotate")
    for name in found:
        stream = QuantizedLawAdapter(subject, num_layers=1, format=name, head_dim=DIM)
        at_least(stream.cache, capacity=4)
        yield stream


def tokens(subject: Subject, stream: QuantizedLawAdapter, count: int) -> list[np.ndarray]:
    return list(pair_of_tokens(subject, count, stream.config["num_kv_heads"], stream.config["head_dim"]))


@check("FMT-ROT-04", "quantized")
def no_head_is_rotated_with_another(subject: Subject) -> None:
    subject.need(num_kv_heads=2)
    for stream in hadamard_streams(subject):
        keys, values = tokens(subject, stream, 3)
        stream.give(keys, values)
        before, beside = stream.read(), stream.fresh(num_layers=1, format=stream.config["format"], head_dim=DIM)
        loud = [part * np.where(np.arange(part.shape[1])[:, None] == 0, LOUD, np.float32(1)) for part in (keys, values)]
        beside.give(*loud)
        (keys_beside, values_beside), (keys_alone, values_alone) = beside.read(), before
        alone = keys_alone[:, 1:], values_alone[:, 1:]
        assert_pair(
            (keys_beside[:, 1:], values_beside[:, 1:]),
            alone,
            f"heads of {stream.config['format']} tokens next to a head of large values",
        )
        reads_back(stream, keys, values, f"{stream.config['format']} tokens")


@check("FMT-ROT-07a", "quantized")
def rotated_tokens_read_back_as_their_format_says(subject: Subject) -> None:
    for stream in hadamard_streams(subject):
        keys, values = tokens(subject, stream, 4)
        stream.give(keys, values)
        reads_back(stream, keys, values, f"4 {stream.config['format']} tokens")
        stream.cache.truncate(2)
        keys[2:], values[2:] = tokens(subject, stream, 2)
        stream.give(keys[2:], values[2:])
        reads_back(stream, keys, values, f"{stream.config['format']} tokens, two of which replace removed ones")


@check("FMT-ROT-07b", "quantized")
def attention_over_rotated_tokens_is_over_what_they_read_as(subject: Subject) -> None:
    for stream in hadamard_streams(subject):
        stream.give(*tokens(subject, stream, 4))
        heads, dim = stream.config["num_kv_heads"], stream.config["head_dim"]
        query, scale = normal(subject, 1, heads * subject.size("group_size", 2), dim), 2.5 / dim
        want, bound = expected_attention(subject, query, *stream.read(), scale=scale, rotated=True)
        assert_within(stream.cache.attend(0, query, scale), want, bound, f"attention over {stream.config['format']} tokens")


# Checks of FMT-STATIC: a cache with a fixed scale for keys and one for values.

KEY_SCALE, VALUE_SCALE = 0.5, 0.037


def static_streams(subject: Subject, **given: float) -> Iterator[QuantizedLawAdapter]:
    """Yields a cache of one layer per format, with these scales."""
    for name in formats_of(subject, "format", *STATIC):
        stream = QuantizedLawAdapter(subject, num_layers=1, format=name, **given)
        at_least(stream.cache, capacity=4)
        yield stream


@check("FMT-STATIC-06a", "quantized")
def keys_and_values_are_stored_by_the_scale_that_is_theirs(subject: Subject) -> None:
    for stream in static_streams(subject, key_scale=KEY_SCALE, value_scale=VALUE_SCALE):
        keys, values = pair_of_tokens(subject, 4)
        keys[2:] = round_to_input_dtype(subject, keys[2:] * LOUD)  # a scale computed from the first tokens would clip these
        stream.give(keys[:2], values[:2])
        stream.give(keys[2:], values[2:])
        reads_back(stream, keys, values, f"{stream.config['format']} tokens")
        stream.cache.truncate(1)
        stream.give(values[1:], keys[1:])
        keys[1:], values[1:] = values[1:].copy(), keys[1:].copy()
        reads_back(stream, keys, values, f"{stream.config['format']} tokens, three of which replace removed ones")


@check("FMT-STATIC-06b", "quantized")
def a_scale_that_is_not_given_is_one(subject: Subject) -> None:
    for given in ({}, {"key_scale": KEY_SCALE}, {"value_scale": VALUE_SCALE}):
        for stream in static_streams(subject, **given):
            keys, values = pair_of_tokens(subject, 3)
            stream.give(keys, values)
            reads_back(stream, keys, values, f"{stream.config['format']} tokens with scales {given or 'not passed'}")


@check("ATTN-10", "quantized")
def attention_is_over_keys_and_values_by_the_scale_that_is_theirs(subject: Subject) -> None:
    for stream in static_streams(subject, key_scale=KEY_SCALE, value_scale=VALUE_SCALE):
        stream.give(*pair_of_tokens(subject, 4))
        query = queries(subject, 1)
        want, bound = expected_attention(subject, query, *stream.read(), scale=default_scale(subject))
        assert_within(
            stream.cache.attend(0, query, default_scale(subject)), want, bound, f"attention over {stream.config['format']} tokens"
        )


@check("FMT-STATIC-05a", "quantized")
def a_cache_of_a_scale_that_is_none_is_refused(subject: Subject) -> None:
    for name in formats_of(subject, "format", *STATIC):
        for which in ("key_scale", "value_scale"):
            for wrong in (0.0, -0.5, *(() if subject.by_value else (float("nan"), float("inf")))):
                config = new(subject, "quantized", format=name).config
                with raises("ConfigError"):
                    subject.new("quantized", **config | {which: wrong})


@check("FMT-STATIC-05b", "quantized")
def a_cache_whose_format_makes_its_own_scales_takes_none(subject: Subject) -> None:
    formats_of(subject, "format", *STATIC)
    if not supports(subject, "format", "int8"):
        raise NotOffered("format int8")
    for which in ("key_scale", "value_scale"):
        refused(subject, "quantized", **{"format": "int8", which: 0.5})


@check("FMT-STATIC-08", "quantized")
def memory_is_a_byte_a_number(subject: Subject) -> None:
    for name in formats_of(subject, "format", *STATIC):
        cache = new(subject, "quantized", format=name, key_scale=KEY_SCALE)
        layers, capacity, heads, dim = (cache.config[size] for size in ("num_layers", "capacity", "num_kv_heads", "head_dim"))
        assert_equal(cache.memory_bytes, 2 * layers * capacity * heads * dim, f"memory_bytes in {name}")
