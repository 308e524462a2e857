"""Checks of QUANT: tokens that are quantized when they are appended, and of ATTN, EDIT, FMT and LAW for this family."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.quantized.law_adapter import formats_in_groups, formats_of_tokens
from kvref_conformance.families.quantized.model import Quantized
from kvref_conformance.families.rows.input_rows import formats_of_rows, widths
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import (
    AFFINE_FORMATS,
    FORMATS_IN_GROUPS,
    ROTATED_FORMATS,
    STATIC_FORMATS,
    SYMMETRIC_FORMATS,
    group_of,
)
from kvref_conformance.oracle.formats.hadamard_rotation import block_of
from kvref_conformance.oracle.formats.per_row import read_as
from kvref_conformance.oracle.token_storage import row_bytes
from kvref_conformance.testlib.assertions import (
    assert_equal,
    assert_pair,
    assert_reads,
    assert_same,
    assert_within,
    default_scale,
    expected_attention,
    normal_rows,
    raises,
    random_queries,
)
from kvref_conformance.testlib.fixtures import (
    assert_config_error,
    construct,
    new_object,
    random_pair,
    require_sizes,
    round_to_input_dtype,
    supported_formats,
    supports,
)
from kvref_conformance.testlib.integer_types import Observation, TypedIntegers, assert_same_for_integer_types
from kvref_conformance.testlib.production_sizes import affordable_tokens
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.session import Session
from kvref_conformance.testlib.tagged_content import WrittenContent, assert_content, content_pair

Pair = tuple[NDArray, NDArray]
LOUD, QUIET = np.float32(2.0**8), np.float32(2.0**-8)  # factors


class QuantizedFixture(Session):
    """A cache to which random tokens are appended: to every layer by `step`, or to layer 0 by `append`."""

    model: Quantized

    def __init__(self, subject: Subject, steps: int = 0, **changes: Any) -> None:
        """steps: the number of tokens in every layer. Raises NotOffered if the limits leave less room."""
        super().__init__(subject, **changes)
        require_sizes(self.cache, capacity=steps)
        for _ in range(steps):
            self.step()

    def random(self, count: int) -> Pair:
        return random_pair(self.subject, count, *self.model.row)

    def step(self) -> None:
        self.cache.append_step(*self.random(self.model.num_layers))

    def append(self, count: int) -> Pair:
        """Appends `count` tokens to layer 0, and returns them."""
        tokens = self.random(count)
        self.append_tokens(*tokens)
        return tokens

    def append_tokens(self, keys: NDArray, values: NDArray) -> None:
        """Appends to layer 0. If only append_step is provided, a new cache with a single layer replaces an empty one.

        Raises NotOffered if the limits leave less room.
        """
        require_sizes(self.cache, capacity=len(self.model.tokens[0]) + len(keys))
        try:
            self.cache.append(0, keys, values)
        except NotOffered:
            if self.model.num_layers == 1 or any(self.model.tokens):
                raise
            self.cache = new_object(self.subject, "quantized", **self.cache.config | {"num_layers": 1})
            self.cache.append(0, keys, values)

    def read(self) -> Pair:
        """Returns all tokens of layer 0."""
        keys, values = self.cache.read_tokens(0, list(range(len(self.model.tokens[0]))))
        return keys, values

    def assert_reads(self, keys: NDArray, values: NDArray) -> None:
        """Raises ClauseViolation unless layer 0 contains exactly these tokens, as its format stores them."""
        format, (key_scale, value_scale) = self.model.format, self.model.scales
        wanted = read_as(keys, format, key_scale), read_as(values, format, value_scale)
        assert_reads(self.subject, self.read(), wanted, f"{format} tokens of layer 0", format)


def cache_after_steps(subject: Subject, steps: int, **config: Any) -> ObjectProxy:
    """Returns a cache without a session, for checks in which a wrong format is not a failure."""
    cache = new_object(subject, "quantized", **config)
    require_sizes(cache, capacity=steps)
    for _ in range(steps):
        cache.append_step(*random_pair(subject, *(cache.config[size] for size in ("num_layers", "num_kv_heads", "head_dim"))))
    return cache


def lengths(cache: ObjectProxy) -> list[int]:
    """Returns the length of every layer."""
    return [cache.length(layer) for layer in range(cache.config["num_layers"])]


@check("QUANT-01a", "quantized")
def append_adds_tokens_to_one_layer(subject: Subject) -> None:
    subject.require_size(num_layers=2)
    for name in formats_of_tokens(subject):
        session = QuantizedFixture(subject, format=name)
        tokens = session.append(3)
        assert_equal(lengths(session.cache)[:2], [3, 0], "lengths of layers 0 and 1 after an append of 3 tokens to layer 0")
        session.assert_reads(*tokens)


@check("LAW-01", "quantized")
@check("QUANT-01a", "quantized")
def append_of_too_many_tokens_changes_nothing(subject: Subject) -> None:
    for name in formats_of_tokens(subject):
        session = QuantizedFixture(subject, format=name)
        session.append(3)
        session.look()
        with raises("CapacityExceeded"):
            session.cache.append(0, *session.random(session.model.room - 2))
        session.look()


@check("QUANT-01b", "quantized")
def append_step_adds_a_token_to_every_layer(subject: Subject) -> None:
    session = QuantizedFixture(subject, steps=3)
    layers = session.model.num_layers
    assert_equal(lengths(session.cache), [3] * layers, "lengths after 3 steps")
    session.look()
    with raises("ShapeMismatch"):
        session.cache.append_step(*session.random(layers + 1))
    session.look()


@check("QUANT-02", "quantized")
def append_to_a_full_layer_raises(subject: Subject) -> None:
    session = QuantizedFixture(subject, capacity=4)
    session.append(session.model.room)
    with raises("CapacityExceeded"):
        session.cache.append(0, *session.random(1))
    session.look()


@check("QUANT-03", "quantized")
def append_stores_a_scale_per_head(subject: Subject) -> None:
    subject.require_size(num_kv_heads=2)
    for name in formats_of_tokens(subject):
        session = QuantizedFixture(subject, format=name)
        keys, values = session.random(3)
        keys[:, 0] *= LOUD
        values[:, 1] = round_to_input_dtype(subject, values[:, 1] * QUIET)
        session.append_tokens(keys, values)
        session.assert_reads(keys, values)


@check("QUANT-04", "quantized")
def read_operations_agree(subject: Subject) -> None:
    positions = [4, 0, 2]
    for name in formats_of_tokens(subject):
        cache, found = cache_after_steps(subject, 5, format=name), {}
        for read in (read_tokens, read_each_token, read_each_head):
            try:
                found[read.__name__] = read(cache, positions)
            except NotOffered as lacking:
                missing = lacking
        if len(found) < 2:
            raise NotOffered(f"two read operations ({missing})")
        first, *others = found
        for other in others:
            assert_pair(found[other], found[first], f"tokens {positions} from {other}, compared with {first}")


def read_tokens(cache: ObjectProxy, positions: Sequence[int]) -> Pair:
    keys, values = cache.read_tokens(0, positions)
    return keys, values


def read_each_token(cache: ObjectProxy, positions: Sequence[int]) -> Pair:
    return _stacked([cache.read_token(0, position) for position in positions])


def read_each_head(cache: ObjectProxy, positions: Sequence[int]) -> Pair:
    heads = range(cache.config["num_kv_heads"])
    return _stacked([_stacked([cache.read_head(0, position, head) for head in heads]) for position in positions])


def _stacked(pairs: Sequence[Pair]) -> Pair:
    return np.stack([keys for keys, _ in pairs]), np.stack([values for _, values in pairs])


@check("QUANT-05", "quantized")
def append_leaves_quantized_tokens_unchanged(subject: Subject) -> None:
    for name in formats_of_tokens(subject):
        session = QuantizedFixture(subject, format=name)
        tokens = session.append(2)
        session.assert_reads(*tokens)
        first = session.read()
        for _ in range(6):
            session.append_tokens(*(part * np.float32(64) for part in session.random(1)))
            assert_pair(session.cache.read_tokens(0, [0, 1]), first, f"the first two {name} tokens after another append")


@check("QUANT-06", "quantized")
def append_stores_separate_scales_for_keys_and_values(subject: Subject) -> None:
    for name in formats_of_tokens(subject):
        session = QuantizedFixture(subject, format=name)
        keys, values = session.random(3)
        keys, values = keys * LOUD, round_to_input_dtype(subject, values * QUIET)
        session.append_tokens(keys, values)
        session.assert_reads(keys, values)


@check("QUANT-07", "quantized")
def memory_bytes_counts_codes_and_scales_of_the_capacity(subject: Subject) -> None:
    for name in supported_formats(subject, "format", *SYMMETRIC_FORMATS):
        for capacity, layers in ((20, 2), (7, 3)):
            session = QuantizedFixture(subject, format=name, capacity=capacity, num_layers=layers)
            session.look("memory_bytes", "fp32_bytes", "compression_ratio")
            with suppress(NotOffered):
                session.step()
            session.look("memory_bytes", "fp32_bytes", "compression_ratio")
            heads, dim = session.model.row
            stored = 2 * session.model.num_layers * session.model.room * heads * (dim + 4)
            with suppress(NotOffered):
                assert_equal(session.cache.memory_bytes, stored, "memory_bytes")


@check("QUANT-08", "quantized")
def clear_empties_every_layer(subject: Subject) -> None:
    session = QuantizedFixture(subject, capacity=4)
    layers = session.model.num_layers
    for _ in range(session.model.room):
        session.step()
    session.cache.clear()
    assert_equal(lengths(session.cache), [0] * layers, "lengths after clear")
    for layer in range(layers):
        with raises("PositionOutOfRange"):
            session.cache.read_token(layer, 0)
    session.step()
    session.look()


@check("QUANT-09", "rows")
def mean_absolute_error_is_over_all_elements(subject: Subject) -> None:
    family = subject.new("rows")
    for name in formats_of_rows(subject, *SYMMETRIC_FORMATS, *AFFINE_FORMATS, *FORMATS_IN_GROUPS):
        for count, wanted in ((1, 1), (3, 7), (65, 16), *[(1025, 1)] * (group_of(name) == 1)):
            rows = subject.rng.normal(size=(count, *widths(subject, wanted, format=name)))
            rows[-1] *= 100  # a mean of the means of chunks of rows would count the last row too often
            rows = round_to_input_dtype(subject, rows)
            read = read_as(rows, name)
            want = np.abs(rows.astype(np.float64) - read.values).mean()
            # float32 differences and their sum in any order: each term rounds at most size + 2 times.
            bound = want * (rows.size + 2) * 2.0**-23
            bound += read.slack.mean() if subject.level == "tolerant" else 0
            assert_within(family.mean_absolute_error(rows, name), want, bound, f"mean absolute error of {name} rows")
        none = np.zeros((0, *widths(subject, 4, format=name)), np.float32)
        assert_same(family.mean_absolute_error(none, name), np.float32(0), f"mean absolute error of 0 {name} rows")


@check("ATTN-10", "quantized")
def attend_uses_the_values_that_read_returns(subject: Subject) -> None:
    for name in formats_of_tokens(subject):
        cache, scale = cache_after_steps(subject, 7, format=name), default_scale(subject)
        for layer in range(cache.config["num_layers"]):
            query = random_queries(subject, layer % 3 + 1)
            want, bound = expected_attention(subject, query, *cache.read_tokens(layer, list(range(7))), scale=scale)
            what = f"attention of {len(query)} queries over {name} tokens in layer {layer}"
            assert_within(cache.attend(layer, query, scale), want, bound, what)


# Checks of EDIT for the quantized cache: `truncate` of every layer.


def step(subject: Subject, layers: int, loud: float = 1.0) -> Pair:
    """Returns one token per layer."""
    keys, values = (round_to_input_dtype(subject, part * loud) for part in random_pair(subject, layers))
    return keys, values


def cache_and_steps(subject: Subject, count: int, **config: str) -> tuple[ObjectProxy, list[Pair]]:
    """Returns a cache after `count` steps, and the steps."""
    cache = new_object(subject, "quantized", **config)
    require_sizes(cache, capacity=count)
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
    """Raises ClauseViolation unless every layer has `count` tokens and reads as `want`."""
    assert_equal(lengths(cache), [count] * cache.config["num_layers"], f"lengths {when}")
    for layer, read in enumerate(held_by(cache, count)):
        assert_pair(read, want[layer], f"layer {layer} {when}")


@check("EDIT-01bc", "quantized")
def truncated_positions_cannot_be_read(subject: Subject) -> None:
    cache, _ = cache_and_steps(subject, 5)
    for length in (3, 0):
        cache.truncate(length)
        for layer in range(cache.config["num_layers"]):
            for position in (length, 4):
                with raises("PositionOutOfRange"):
                    cache.read_token(layer, position)


@check("EDIT-01a", "quantized")
def truncate_shortens_layers_of_different_lengths(subject: Subject) -> None:
    subject.require_size(num_layers=2)
    for longer in (0, 1):
        cache, _ = cache_and_steps(subject, 4)
        require_sizes(cache, capacity=7)
        cache.append(longer, *random_pair(subject, 3))
        before = held_by(cache, 3)
        cache.truncate(3)
        holds(cache, before, 3, f"after truncate(3) of 4 tokens and 7 in layer {longer}")


@check("EDIT-02a", "quantized")
def truncate_past_the_shortest_layer_raises(subject: Subject) -> None:
    subject.require_size(num_layers=2)
    for longer in (0, 1):
        cache, _ = cache_and_steps(subject, 2)
        require_sizes(cache, capacity=5)
        cache.append(longer, *random_pair(subject, 3))
        before = lengths(cache)
        with raises("PositionOutOfRange"):
            cache.truncate(3)
        assert_equal(lengths(cache), before, f"lengths after a rejected truncate(3) of 2 tokens and 5 in layer {longer}")


def never(subject: Subject, cache: ObjectProxy, steps: list[Pair]) -> list[Pair]:
    """Returns what a new cache of the same sizes reads as after these steps."""
    other = construct(subject, "quantized", **cache.config)
    given(other, steps)
    return held_by(other, len(steps))


@check("EDIT-03", "quantized")
def truncate_makes_room_up_to_the_capacity(subject: Subject) -> None:
    cache = new_object(subject, "quantized", capacity=4)
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


def four_tokens(subject: Subject, format: str) -> tuple[QuantizedFixture, Pair]:
    """Returns a cache with two groups per row and 4 tokens, and the tokens."""
    session = QuantizedFixture(subject, num_layers=1, format=format, head_dim=2 * group_of(format))
    return session, session.append(4)


@check("QUANT-10a", "quantized")
def read_returns_tokens_as_their_format_stores_them(subject: Subject) -> None:
    for name in formats_in_groups(subject):
        session, tokens = four_tokens(subject, name)
        session.assert_reads(*tokens)


@check("QUANT-10b", "quantized")
def truncate_and_clear_remove_codes_and_scales(subject: Subject) -> None:
    for name in formats_in_groups(subject):
        session, _ = four_tokens(subject, name)
        session.cache.truncate(2)
        session.append(2)
        session.look()
        session.cache.clear()
        session.append(4)
        session.look()


@check("QUANT-10c", "quantized")
def memory_bytes_counts_groups(subject: Subject) -> None:
    for name in formats_in_groups(subject):
        cache = new_object(subject, "quantized", format=name, head_dim=2 * group_of(name))
        rows = 2 * cache.config["num_layers"] * cache.config["capacity"] * cache.config["num_kv_heads"]
        assert_equal(cache.memory_bytes, rows * row_bytes(cache.config["head_dim"], name), f"memory_bytes in {name}")


@check("QUANT-10d", "quantized")
def new_with_a_head_dim_that_is_no_multiple_of_the_group_raises(subject: Subject) -> None:
    wrong = [
        (name, dim)
        for name in formats_in_groups(subject)
        for dim in (group_of(name) + 1, group_of(name) // 2)
        if supports(subject, "head_dim", dim)
    ]
    if not wrong:
        raise NotOffered("a head_dim that is not a multiple of a group")
    for name, dim in wrong:
        config = new_object(subject, "quantized", format=name, head_dim=group_of(name)).config
        with raises("ConfigError"):
            subject.new("quantized", **config | {"head_dim": dim})


# Checks of LAW-01, LAW-02, LAW-05, LAW-13 and LAW-20 for this family.


@check("LAW-01", "quantized")
def append_step_with_a_full_layer_changes_no_layer(subject: Subject) -> None:
    subject.require_size(num_layers=2)
    session = QuantizedFixture(subject, capacity=2)
    session.cache.append(1, *session.random(session.model.room))
    session.look()
    with raises("CapacityExceeded"):
        session.step()
    session.look()


@check("LAW-20", "quantized")
def new_accepts_every_integer_type(subject: Subject) -> None:
    def script(typed: TypedIntegers) -> Iterator[Observation]:
        cache = typed.new("quantized", capacity=100)
        yield "memory_bytes and fp32_bytes", (cache.memory_bytes, cache.fp32_bytes)

    assert_same_for_integer_types(subject, script)


@check("LAW-20", "quantized")
def read_operations_accept_every_integer_type(subject: Subject) -> None:
    sizes = new_object(subject, "quantized").config
    layer, head = int(sizes["num_layers"]) - 1, int(sizes["num_kv_heads"]) - 1
    steps = [random_pair(subject, sizes["num_layers"]) for _ in range(2)]

    def script(typed: TypedIntegers) -> Iterator[Observation]:
        cache = typed.new("quantized", capacity=100)
        require_sizes(cache, capacity=len(steps))
        for step in steps:
            cache.append_step(*step)
        yield f"length of layer {layer}", typed.call(cache, "length", layer)
        yield "tokens 1 and 0", typed.call(cache, "read_tokens", layer, [1, 0])
        yield f"head {head} of token 1", typed.call(cache, "read_head", layer, 1, head)

    assert_same_for_integer_types(subject, script)


@check("LAW-20", "quantized")
def append_accepts_every_integer_type(subject: Subject) -> None:
    subject.require_size(num_layers=2)
    keys, values = random_pair(subject, 2)

    def script(typed: TypedIntegers) -> Iterator[Observation]:
        cache = typed.new("quantized", capacity=100)
        yield "append to layer 1", typed.call(cache, "append", 1, keys, values)
        yield "length of layer 1", typed.call(cache, "length", 1)
        yield "tokens 1 and 0", typed.call(cache, "read_tokens", 1, [1, 0])

    assert_same_for_integer_types(subject, script)


@check("LAW-05a", "quantized")
def read_of_a_position_past_the_end_raises(subject: Subject) -> None:
    for name in formats_of_tokens(subject):
        cache = cache_after_steps(subject, 3, format=name)
        assert_unreadable(cache, 3)


@check("LAW-05a", "quantized")
def read_of_a_cleared_token_raises(subject: Subject) -> None:
    for name in formats_of_tokens(subject):
        cache = cache_after_steps(subject, 3, format=name)
        cache.clear()
        assert_unreadable(cache, 0, 2)


def assert_unreadable(cache: ObjectProxy, *positions: int) -> None:
    for layer in range(cache.config["num_layers"]):
        for position in positions:
            with raises("PositionOutOfRange"):
                cache.read_token(layer, position)
            with raises("PositionOutOfRange"):
                cache.read_head(layer, position, 0)


@check("LAW-13b", "quantized")
def read_of_no_positions_returns_no_tokens(subject: Subject) -> None:
    session = QuantizedFixture(subject)
    session.append(11)
    keys, values = session.cache.read_tokens(0, [])
    assert_equal((len(keys), len(values)), (0, 0), "tokens read at 0 positions")


@check("LAW-02a", "quantized")
def append_leaves_other_layers_unchanged(subject: Subject) -> None:
    subject.require_size(num_layers=2)
    session = QuantizedFixture(subject)
    session.append(11)
    session.cache.append(1, *session.random(1))
    session.look()


# Checks of LAW-18: rows and scales of the quantized cache at high positions of each layer.


@check("LAW-18", "quantized")
def append_to_layers_of_different_length_keeps_their_scales(subject: Subject) -> None:
    for format in subject.formats("int8", "float8_e4m3fn", "float8_e5m2"):
        cache = new_object(subject, "quantized", num_layers=4, capacity=700, num_kv_heads=3, head_dim=96, format=format)
        written = WrittenContent(cache.config["num_kv_heads"], cache.config["head_dim"])
        ends = [0] * cache.config["num_layers"]
        room = affordable_tokens(subject, cache.config["capacity"], 3 * len(ends))
        for count in (1, 15, 1, 47, 64, 129, 400):
            for layer, start in enumerate(ends):
                if more := min(count // (layer + 1), room - start):
                    append_content(cache, layer, 0, range(start, start + more), written)
                    ends[layer] += more
        for layer, end in enumerate(ends):
            assert_cache_contains(
                subject, cache, layer, {0, 16, 17, 64, 127, 128, 255, 256, 257, end - 1} & {*range(end)}, written
            )


def append_content(cache: ObjectProxy, layer: int, stream: int, positions: range, written: WrittenContent) -> None:
    cache.append(layer, *content_pair(stream, layer, positions, written.heads, written.dim))
    written.add_up_to(stream, layer, positions.stop)


def assert_cache_contains(subject: Subject, cache: ObjectProxy, layer: int, positions: set[int], written: WrittenContent) -> None:
    """Raises ClauseViolation unless the tokens of stream 0 are read at these positions."""
    ordered = sorted(positions)
    keys, values = (read_as(part, cache.config["format"]) for part in content_pair(0, layer, ordered, written.heads, written.dim))
    exact = subject.level == "exact"
    assert_content(cache.read_tokens(layer, ordered), 0, layer, ordered, written, exact, (keys, values))


# Checks of FMT-ROT: a cache in rotated formats.

DIM = 64


def rotated_formats(subject: Subject) -> list[str]:
    """Returns the supported ones. Raises NotOffered if no allowed head_dim has a block to rotate."""
    dim, supported = subject.size("head_dim", DIM), supported_formats(subject, "format", *ROTATED_FORMATS)
    if found := [name for name in supported if dim % group_of(name) == 0 and block_of(dim) > 1]:
        return found
    raise NotOffered("a head_dim with a block to rotate")


@check("FMT-ROT-04", "quantized")
def append_rotates_each_head_by_itself(subject: Subject) -> None:
    subject.require_size(num_kv_heads=2)
    for name in rotated_formats(subject):
        session = QuantizedFixture(subject, num_layers=1, format=name, head_dim=DIM)
        keys, values = session.append(3)
        loud = QuantizedFixture(subject, num_layers=1, format=name, head_dim=DIM)
        factors = np.where(np.arange(keys.shape[1])[:, None] == 0, LOUD, np.float32(1))
        loud.append_tokens(keys * factors, values * factors)
        (loud_keys, loud_values), (quiet_keys, quiet_values) = loud.read(), session.read()
        assert_pair(
            (loud_keys[:, 1:], loud_values[:, 1:]),
            (quiet_keys[:, 1:], quiet_values[:, 1:]),
            f"heads of {name} tokens next to a head of large values",
        )
        session.assert_reads(keys, values)


@check("FMT-ROT-07a", "quantized")
def read_returns_rotated_tokens_as_their_format_stores_them(subject: Subject) -> None:
    for name in rotated_formats(subject):
        session = QuantizedFixture(subject, num_layers=1, format=name, head_dim=DIM)
        keys, values = session.append(4)
        session.assert_reads(keys, values)
        session.cache.truncate(2)
        keys[2:], values[2:] = session.append(2)
        session.assert_reads(keys, values)


@check("FMT-ROT-07b", "quantized")
def attend_over_rotated_tokens_uses_the_values_that_read_returns(subject: Subject) -> None:
    for name in rotated_formats(subject):
        cache = cache_after_steps(subject, 4, num_layers=1, format=name, head_dim=DIM)
        heads, dim = cache.config["num_kv_heads"], cache.config["head_dim"]
        query, scale = normal_rows(subject, 1, heads * subject.size("group_size", 2), dim), 2.5 / dim
        want, bound = expected_attention(subject, query, *cache.read_tokens(0, list(range(4))), scale=scale, rotated=True)
        assert_within(cache.attend(0, query, scale), want, bound, f"attention over {name} tokens")


# Checks of FMT-STATIC: a cache with a fixed scale for keys and one for values.

SCALES = {"key_scale": 0.5, "value_scale": 0.037}


def static_caches(subject: Subject, **scales: Any) -> Iterator[QuantizedFixture]:
    """Yields a cache of one layer per format, with these scales."""
    for name in supported_formats(subject, "format", *STATIC_FORMATS):
        yield QuantizedFixture(subject, num_layers=1, format=name, **scales)


@check("FMT-STATIC-06a", "quantized")
def append_uses_the_key_scale_and_the_value_scale(subject: Subject) -> None:
    for session in static_caches(subject, **SCALES):
        keys, values = session.random(4)
        keys[2:] = round_to_input_dtype(subject, keys[2:] * LOUD)  # a scale computed from the first tokens would clip these
        session.append_tokens(keys[:2], values[:2])
        session.append_tokens(keys[2:], values[2:])
        session.assert_reads(keys, values)
        session.cache.truncate(1)
        session.append_tokens(values[1:], keys[1:])
        session.look()


@check("FMT-STATIC-06b", "quantized")
def new_without_a_scale_uses_one(subject: Subject) -> None:
    for scales in ({}, {"key_scale": 0.5}, {"value_scale": 0.037}):
        for session in static_caches(subject, **scales):
            keys, values = session.append(3)
            session.assert_reads(keys, values)


@check("ATTN-10", "quantized")
def attend_uses_the_key_scale_and_the_value_scale(subject: Subject) -> None:
    for name in supported_formats(subject, "format", *STATIC_FORMATS):
        cache = cache_after_steps(subject, 4, num_layers=1, format=name, **SCALES)
        query, scale = random_queries(subject, 1), default_scale(subject)
        want, bound = expected_attention(subject, query, *cache.read_tokens(0, list(range(4))), scale=scale)
        assert_within(cache.attend(0, query, scale), want, bound, f"attention over {name} tokens")


@check("FMT-STATIC-05a", "quantized")
def new_with_a_scale_that_is_not_positive_and_finite_raises(subject: Subject) -> None:
    for name in supported_formats(subject, "format", *STATIC_FORMATS):
        for which in SCALES:
            for wrong in (0.0, -0.5, *(() if subject.by_value else (float("nan"), float("inf")))):
                config = new_object(subject, "quantized", format=name).config
                with raises("ConfigError"):
                    subject.new("quantized", **config | {which: wrong})


@check("FMT-STATIC-05b", "quantized")
def new_with_a_scale_for_a_format_that_computes_scales_raises(subject: Subject) -> None:
    supported_formats(subject, "format", *STATIC_FORMATS)
    if not supports(subject, "format", "int8"):
        raise NotOffered("format int8")
    for which in SCALES:
        assert_config_error(subject, "quantized", **{"format": "int8", which: 0.5})


@check("FMT-STATIC-08", "quantized")
def memory_bytes_is_one_byte_per_number(subject: Subject) -> None:
    for name in supported_formats(subject, "format", *STATIC_FORMATS):
        cache = new_object(subject, "quantized", format=name, key_scale=0.5)
        layers, capacity, heads, dim = (cache.config[size] for size in ("num_layers", "capacity", "num_kv_heads", "head_dim"))
        assert_equal(cache.memory_bytes, 2 * layers * capacity * heads * dim, f"memory_bytes in {name}")
