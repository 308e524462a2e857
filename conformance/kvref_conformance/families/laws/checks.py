"""The laws: checks of every family, through its law adapter.

Topics: ownership of arrays, dtypes, counters, invalid calls, sizes, production sizes, contents.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from kvref_conformance.calls.derived_operations import require_unsplit_error
from kvref_conformance.calls.messages import KNOWN_KINDS, error_kinds, to_call_error
from kvref_conformance.calls.recorder import OwnArray
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.families import Family
from kvref_conformance.families.rows.input_rows import NEAR, largest
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import PLAIN_FORMATS
from kvref_conformance.testlib.assertions import (
    KeptResults,
    assert_equal,
    assert_reads,
    assert_same,
    assert_true,
    assert_within,
    blaming,
    default_scale,
    expected_attention,
    may_raise,
    raises,
)
from kvref_conformance.testlib.fixtures import (
    NANS,
    assert_config_error,
    new_object,
    random_tokens,
    round_to_input_dtype,
    strided_view,
    supports,
)
from kvref_conformance.testlib.law_adapter import (
    MANY_TOKENS,
    LawAdapter,
    assert_counters_within_bounds,
    assert_same_observables,
    assert_tokens_kept,
    assert_whole_appends_kept,
    call_tolerating_errors,
    fill_stream,
    overrides,
)
from kvref_conformance.testlib.production_sizes import (
    HEAD_DIMS,
    MODEL_SHAPES,
    FilledStream,
    affordable_tokens,
    power_of_two_edges,
)
from kvref_conformance.testlib.registry import configuration_check, law


@law("LAW-16")
def append_leaves_its_arguments_unchanged(stream: LawAdapter) -> None:
    subject = stream.subject
    subject.require_same_process()
    given = stream.tokens(subject.size("tokens", 5))
    stream.require_room(len(given[0]))
    keys, values = (stream.to_cache_layout(part) for part in given)
    own_keys, own_values = subject.to_own_array(keys), subject.to_own_array(values)
    stream.append_arrays(own_keys, own_values)
    assert_same(subject.numpy(own_keys.array), keys, "the appended keys array, after the append")
    assert_same(subject.numpy(own_values.array), values, "the appended values array, after the append")


@law("LAW-17", "read_unconverted")
def read_results_stay_after_later_calls(stream: LawAdapter) -> None:
    subject = stream.subject
    subject.require_same_process()
    fill_stream(stream, 4)
    first = stream.read_unconverted()
    before = [subject.numpy(part) for part in first]
    stream.append(*stream.tokens(5))
    stream.read_unconverted()
    for change in (partial(stream.overwrite, *stream.tokens(4)), stream.clear):
        with suppress(NotOffered):
            change()
    stream.append(*stream.tokens(4))
    stream.read_unconverted()
    for name, part, was in zip(("keys", "values"), first, before, strict=True):
        assert_same(subject.numpy(part), was, f"{name} that an earlier read returned, after later writes and reads")


@law("LAW-17", "array_calls")
def results_of_any_operation_stay_after_later_calls(stream: LawAdapter) -> None:
    kept, streams = KeptResults(stream.subject), [stream]
    with suppress(NotOffered):
        streams.append(stream.sibling())

    def keep() -> None:
        for each in (each for each in streams if len(each)):
            attend = (
                [("attend", (*each.attend_arguments(), each.query(), 1.0))] if overrides(type(each), "attend_arguments") else []
            )
            for name, args in [*each.array_calls(), *attend]:
                with suppress(NotOffered):
                    kept.add(name, each.cache.as_is(name, *args))

    for change in (
        partial(fill_stream, stream, 4),
        partial(fill_stream, streams[-1], 5),
        stream.clear,
        partial(fill_stream, stream, 3),
    ):
        with suppress(NotOffered):
            change()
        keep()
    if not kept.kept:
        raise NotOffered("an operation that returns an array")
    kept.assert_unchanged()


@law("LAW-17", "array_calls")
def results_of_a_cache_with_a_single_part_stay_after_later_calls(stream: LawAdapter) -> None:
    """All tokens are in one block, tier or buffer, which could be returned without a copy. Others replace them after `clear`."""
    kept = KeptResults(stream.subject)
    for count in (1, *container_sizes(stream)):
        for _ in range(2):
            stream.require_room(count)
            fill_stream(stream, count)
            for name, args in stream.array_calls() if len(stream) else ():
                with suppress(NotOffered):
                    kept.add(f"{name} of {count} tokens", stream.cache.as_is(name, *args))
            stream.clear()
    fill_stream(stream, 3)
    if not kept.kept:
        raise NotOffered("an operation that returns an array")
    kept.assert_unchanged()


@law("FMT-LEVEL-04b")
def append_of_float64_raises(stream: LawAdapter) -> None:
    fill_stream(stream, 2)
    before = stream.all_observables()
    keys, values = (stream.to_cache_layout(part) for part in stream.tokens(1))
    wide_keys, wide_values = (part.astype(np.float64) for part in (keys, values))
    for pair in ((wide_keys, wide_values), (keys, wide_values), (wide_keys, values)):
        with raises("DtypeMismatch"):
            stream.append_arrays(*pair)
        assert_same_observables(stream.all_observables(), before, "after a float64 array was rejected")


@law("FMT-LEVEL-05", "quantizing_streams")
def accepted_tokens_read_back_finite(stream: LawAdapter) -> None:
    subject = stream.subject
    for quantizing in stream.quantizing_streams():
        token = round_to_input_dtype(subject, np.full((1, subject.heads, subject.dim), NEAR[0] * largest(subject)))
        token[0, 0, 0] = largest(subject)
        with may_raise("NonFinite"):
            quantizing.append(token, token)
            for part in quantizing.read():
                what = f"a token with the largest {subject.dtype} value, in a cache of {quantizing.config}"
                assert_true(np.isfinite(part).all(), what, "finite values, or NonFinite", part.tolist())


# Checks of LAW-19: no call, valid or not, brings a count out of its bounds.

TOKENS = 11, 29  # the number appended first, and the largest number after all calls


@law("LAW-19", "invalid_calls", "counters")
def counters_stay_within_bounds(stream: LawAdapter) -> None:
    stream.append(*stream.tokens(TOKENS[0]))
    for name, args in stream.invalid_calls():
        call_tolerating_errors(getattr(stream.cache, name), *args)
        shown = ", ".join(str(arg) for arg in args if isinstance(arg, int))
        assert_counters_within_bounds(stream.counters(sum(TOKENS)), f"{name}({shown})")


# Checks of LAW-01, LAW-10, LAW-11 and LAW-12: invalid calls raise the right error and change no observable.


@law("LAW-10")
def append_of_a_wrong_shape_raises(stream: LawAdapter) -> None:
    fill_stream(stream)
    before = stream.all_observables()
    for keys, values in stream.wrong_shapes():
        with raises("ShapeMismatch"):
            stream.append_arrays(keys, values)
        assert_same_observables(
            stream.all_observables(), before, f"after rejected keys {list(keys.shape)}, values {list(values.shape)}"
        )


@law("LAW-10", "other_array_calls")
def other_operations_reject_wrong_shapes(stream: LawAdapter) -> None:
    fill_stream(stream)
    others = stream.other_array_calls()  # first, because it may need other objects of the cache
    before, tried = stream.all_observables(), 0
    for method, calls in others.items():
        for arguments in calls:
            with suppress(NotOffered):
                with raises("ShapeMismatch"):
                    getattr(stream.cache, method)(*arguments)
                tried += 1
            assert_same_observables(stream.all_observables(), before, f"after {method} rejected a wrong shape")
    if not tried:
        raise NotOffered("another operation that appends arrays")


@law("LAW-11", "out_of_range_calls")
def arguments_out_of_range_raise(stream: LawAdapter) -> None:
    fill_stream(stream)
    before = stream.all_observables()
    for kind, method, arguments in stream.out_of_range_calls():
        with suppress(NotOffered), raises(kind):
            getattr(stream.cache, method)(*arguments)
        assert_same_observables(stream.all_observables(), before, f"after {method} raised {kind}")


@law("LAW-01")
def calls_that_raise_change_nothing(stream: LawAdapter) -> None:
    """A call that raises no such error breaks other clauses. It is left out, and the rest begins again in a new stream."""
    stream, keys, values = fill_stream(stream)
    assert_tokens_kept(stream, keys, values, "before invalid calls")
    before, left_out = stream.all_observables(), set[int]()
    while True:
        results = dict[int, bool | None]()
        for i, call in enumerate(_invalid_calls(stream)):
            if i not in left_out:
                results[i] = _is_rejected(call)
            if results.get(i) is False:  # it may have changed the stream, so that later calls are valid
                left_out.add(i)
                break
        else:
            break
        stream, keys, values = fill_stream(stream.new_cache())
        before = stream.all_observables()
    if True not in results.values():
        raise NotOffered("an invalid call that raises an error of the specification")
    assert_same_observables(stream.all_observables(), before, "after invalid calls")
    more = stream.tokens(2)
    stream.append(*more)
    want = [np.concatenate([a, b]) for a, b in zip((keys, values), more, strict=True)]
    assert_reads(stream.subject, stream.read(), stream.expected(*want), "tokens appended after invalid calls")


def _is_rejected(call: Callable[[], Any]) -> bool | None:
    """Whether a call raises an error of the specification; None if it is not offered."""
    try:
        call()
    except NotOffered:
        return None
    except ClauseViolation:
        raise
    except Exception as error:
        require_unsplit_error(error)
        return to_call_error(error).kind in KNOWN_KINDS
    return False


def _invalid_calls(stream: LawAdapter) -> list[Callable[[], Any]]:
    """Returns calls with wrong shapes, values out of range and a wrong dtype."""
    calls = [partial(stream.append_arrays, keys, values) for keys, values in stream.wrong_shapes()]
    calls += [partial(_call, stream, method, arguments) for _, method, arguments in stream.out_of_range_calls()]
    return [
        *calls,
        partial(stream.append_arrays, *(stream.to_cache_layout(part).astype(np.float64) for part in stream.tokens(1))),
    ]


def _call(stream: LawAdapter, method: str, arguments: tuple[Any, ...]) -> None:
    getattr(stream.cache, method)(*arguments)


BAD_SIZES: tuple[Any, ...] = (0, -1, 1.5, None, "2")


@configuration_check("LAW-12a")
def new_with_invalid_sizes_raises(subject: Subject, family: Family) -> None:
    new_object(subject, family.name)
    tried = 0
    for name, value in family.small.items():
        sizes = BAD_SIZES[1:] if name in family.may_be_zero else BAD_SIZES
        bad_values = ("float7", "", None, "int8", "float16") if isinstance(value, str) else sizes
        for bad in (bad for bad in bad_values if bad not in family.formats.get(name, ())):
            with suppress(NotOffered):
                assert_config_error(subject, family.name, **{name: bad})
                tried += 1
    if not tried:
        raise NotOffered("a factory that accepts sizes")


ODD_SIZES = (1, 3, 7)  # sizes to try where the limits name none
FEW = 3  # values to try at each end of a list of allowed values
LARGEST = 64  # times the size that checks use by default; larger sizes would need too much memory


@configuration_check("LAW-12b")
def new_accepts_every_size_within_the_limits(subject: Subject, family: Family) -> None:
    default = new_object(subject, family.name).config
    for name in family.small:
        for value in _at_the_edges(subject, family, name, default[name]):
            with suppress(NotOffered):  # the format is not provided, or the sizes are not valid together
                new_object(subject, family.name, **{name: value})


def _at_the_edges(subject: Subject, family: Family, name: str, default: Any) -> list[Any]:
    """Returns values that the limits allow, without `default`, the value that checks use by default."""
    if name in family.formats:
        return [each for each in family.formats[name] if supports(subject, name, each)]
    limit = subject.limits.limit(family.name, name)
    ends = sorted(limit.among)
    wanted = {*ends[:FEW], *ends[-FEW:], *ODD_SIZES, limit.least + 1, limit.most or default}
    wanted |= {0} if name in family.may_be_zero else set()
    return sorted({near for each in wanted if (near := limit.nearest(each)) <= LARGEST * max(default, 1)} - {default})


# Checks of LAW-18: the laws at production sizes.

LONG = 4100  # tokens: more than every power of two that is tested, and not a multiple of a block
CHUNKS = 1100  # tokens: more than attention reads at once
HEADS_AND_GROUPS = ((8, 1), (16, 2), (2, 5), (3, 6), (4, 7), (2, 9))  # kv heads, and query heads per kv head
HUNDREDS = 300  # tokens, or owners: more than fit in a byte


def new_filled_stream(stream: LawAdapter, tokens: int, heads: int, dim: int) -> FilledStream:
    """Returns an empty stream of a new cache with room for `tokens` tokens of these sizes, or of the nearest allowed sizes."""
    return FilledStream(stream.new_cache(**stream.sizes_for(tokens), num_kv_heads=heads, head_dim=dim))


@law("LAW-18", "sizes_for")
def appends_at_powers_of_two_keep_every_token(stream: LawAdapter) -> None:
    long = new_filled_stream(stream, LONG, 1, 64)
    for length in power_of_two_edges(affordable_tokens(stream.subject, long.room)):
        long.fill_to(length)
        if length < 300:  # a token that is lost later is still lost at the last look
            long.assert_content()
    long.assert_content()


@law("LAW-18", "sizes_for")
def rows_of_any_width_are_stored_whole(stream: LawAdapter) -> None:
    for dim, heads in zip(HEAD_DIMS, (40, 8, 3, 16, 3, 8), strict=True):
        wide = new_filled_stream(stream, 64, heads, dim)
        for count in (33, 7):
            wide.append(count)
            wide.assert_content()


@law("LAW-18", "sizes_for", "attend_arguments")
def attention_with_any_number_of_heads_uses_the_heads_of_each_group(stream: LawAdapter) -> None:
    for wanted, group in HEADS_AND_GROUPS:
        wide = stream.new_cache(**stream.sizes_for(24), num_kv_heads=wanted)
        wide.append(*wide.tokens(min(24, wide.room())))
        heads, group = wide.config["num_kv_heads"], stream.subject.size("group_size", group)
        query = random_tokens(stream.subject, 1, heads * group, wide.config["head_dim"])
        assert_attention(wide, f"{len(wide)} tokens with {heads} kv heads and {group} query heads per kv head", query)


@law("LAW-18", "sizes_for", "attend_arguments")
def attention_over_more_than_a_chunk_of_tokens_is_right(stream: LawAdapter) -> None:
    """Keys grow, so that the largest logit is in the last chunk, or shrink. Chunks end within memory that contained NaN."""
    subject = stream.subject
    long = stream.new_cache(**stream.sizes_for(CHUNKS), num_kv_heads=2, head_dim=64)
    count = affordable_tokens(subject, min(CHUNKS, long.room()), 8)
    append_non_finite(long, np.nan, count)
    query = np.zeros_like(long.query())
    query[..., 0] = 1.0
    for last in (30.0, 200.0, -200.0):
        try:
            long.clear()
        except NotOffered:
            long = stream.new_cache(**long.config)
        keys, values = long.tokens(count)
        keys[..., 0] = round_to_input_dtype(subject, np.linspace(0.0, last, count))[:, None]
        long.append(keys, values)
        assert_attention(long, f"{count} tokens with logits from 0 to {last}", query, scale=1.0)


@law("LAW-18", "sizes_for")
def hundreds_of_single_appends_keep_every_token(stream: LawAdapter) -> None:
    growing = new_filled_stream(stream, LONG, 2, 64)
    for length in range(1, min(HUNDREDS, growing.room) + 1):
        growing.append(1)
        if length % 64 in (0, 1):
            growing.assert_content()
    growing.assert_content()


@law("LAW-18", "sizes_for")
def hundreds_of_sequences_reuse_the_memory(stream: LawAdapter) -> None:
    passing = new_filled_stream(stream, 64, 2, 64)
    for number in range(HUNDREDS):
        passing.append(affordable_tokens(stream.subject, 17 + number % 16, HUNDREDS))
        if number % 50 in (0, 49):
            passing.assert_content()
        passing.clear()
    passing.append(20)
    passing.assert_content()


@law("LAW-18", "sizes_for", real=True)
def caches_of_model_sizes_keep_every_token(stream: LawAdapter) -> None:
    for heads, dim in MODEL_SHAPES:
        model = new_filled_stream(stream, 2100, heads, dim)
        for count in (1000, 23, 1, 1, 1022, 1, 1, 1):
            model.append(affordable_tokens(stream.subject, count, len(MODEL_SHAPES)))
        model.assert_content()


@law("LAW-18", "sizes_for", real=True)
def thousands_of_single_appends_keep_every_token(stream: LawAdapter) -> None:
    growing = new_filled_stream(stream, LONG, 1, 128)
    while growing.count < min(growing.room, LONG):
        growing.append(1)
        if growing.count % 1024 in (0, 1):
            growing.assert_content()
    growing.assert_content()


# Checks of LAW on every family, through its law adapter.


@law("LAW-02b")
def keys_and_values_are_stored_separately(stream: LawAdapter) -> None:
    keys, values = stream.tokens(MANY_TOKENS)
    stream.append(keys, np.zeros_like(values))
    assert_reads(stream.subject, stream.read(), stream.expected(keys, np.zeros_like(values)), "tokens whose values are all zero")


@law("LAW-02a")
def caches_are_independent(stream: LawAdapter) -> None:
    first, keys, values = fill_stream(stream)
    second, _, _ = fill_stream(stream.new_cache())
    second.append(*stream.tokens(2))
    assert_reads(stream.subject, first.read(), first.expected(keys, values), "a cache, after another cache was filled")


@law("LAW-04")
def reads_return_what_was_written(stream: LawAdapter) -> None:
    _, keys, values = fill_stream(stream)
    assert_equal(len(stream), MANY_TOKENS, f"number of tokens after appends of {MANY_TOKENS}")
    assert_reads(stream.subject, stream.read(), stream.expected(keys, values), f"the tokens after appends of {MANY_TOKENS}")
    more_keys, more_values = stream.tokens(3)
    stream.append(more_keys, more_values)
    all_keys, all_values = np.concatenate([keys, more_keys]), np.concatenate([values, more_values])
    assert_reads(
        stream.subject, stream.read(), stream.expected(all_keys, all_values), f"the tokens after appends of {MANY_TOKENS + 3}"
    )


@law("LAW-04")
def tokens_with_equal_keys_or_values_keep_their_own(stream: LawAdapter) -> None:
    """The equal ones are in one append, in two appends, in two streams, and before and after `clear`."""
    keys, values = stream.tokens(10)
    keys[[1, 3, 5, 8]], keys[7], values[[2, 4, 9]] = keys[0], keys[6], values[0]
    keys[9] = keys[9, :1]  # the heads have one key, and different values
    streams = [stream]
    with suppress(NotOffered):
        streams.append(stream.sibling())
    for when in ("", " after clear or drop"):
        contents = []
        for each in streams:
            values = np.roll(values, 1, axis=0)
            each.append(keys[:6], values[:6])
            each.append(keys[6:], values[6:])
            contents.append(each.expected(keys, values))
        for each, want in zip(streams, contents, strict=True):
            assert_reads(stream.subject, each.read(), want, f"tokens of which some have equal keys or equal values{when}")
        try:
            for each in streams:
                each.clear()
        except NotOffered:
            break


@law("LAW-05b")
def cleared_tokens_cannot_be_read(stream: LawAdapter) -> None:
    assert_whole_appends_kept(stream, 2, "that was never cleared")
    fill_stream(stream)
    stream.clear()
    assert_equal(len(stream), 0, "number of tokens after clear or drop")
    keys, values = stream.tokens(2)
    stream.append(keys, values)
    assert_reads(stream.subject, stream.read(), stream.expected(keys, values), "2 tokens appended after clear or drop")


def assert_attention(stream: LawAdapter, what: str, query: NDArray | None = None, scale: float | None = None) -> None:
    """Raises ClauseViolation unless one query attends over the tokens that `read` returns."""
    query, scale = stream.query() if query is None else query, scale or default_scale(stream.subject)
    want, bound = expected_attention(stream.subject, query, *stream.read(), scale=scale)
    assert_within(stream.cache.attend(*stream.attend_arguments(), query, scale), want, bound, f"attention over {what}")


def assert_attention_of_new_tokens(stream: LawAdapter) -> None:
    """Append 4 tokens to an empty cache. Raises ClauseViolation of ATTN-10 unless one query attends over them."""
    fill_stream(stream, 4)
    with blaming("ATTN-10"):
        assert_attention(stream, "4 tokens of a new cache")


def append_non_finite(stream: LawAdapter, value: float, count: int) -> None:
    """Appends `count` tokens that consist of NaN or infinity, if the cache accepts them."""
    with may_raise("NonFinite"):
        stream.append(*(np.full_like(part, value) for part in stream.tokens(count)))


@law("LAW-05c", "attend_arguments")
def cleared_tokens_have_no_effect_on_attention(stream: LawAdapter) -> None:
    assert_attention_of_new_tokens(stream.new_cache())
    for value in (np.nan, np.inf):
        append_non_finite(stream, value, MANY_TOKENS)
        stream.clear()
        for count in (4, 5):
            stream.append(*stream.tokens(count))
            assert_attention(stream, f"{len(stream)} tokens, after clear or drop of tokens of {value}")
        stream.clear()


@law("LAW-05c", "attend_arguments", "truncatable")
def truncated_tokens_have_no_effect_on_attention(stream: LawAdapter) -> None:
    for each in stream.truncatable():
        assert_attention_of_new_tokens(each)
        append_non_finite(each, np.nan, 4)
        each.truncate(4)
        for count in (0, 1):
            each.append(*each.tokens(count))
            assert_attention(each, f"{len(each)} tokens, after truncate of tokens of NaN")


@law("LAW-06")
def appends_in_chunks_equal_one_append(stream: LawAdapter) -> None:
    stream.subject.require_size(tokens=2)
    whole, keys, values = fill_stream(stream, stream.subject.size("tokens", MANY_TOKENS))
    for size in (1, 2, 4, 7):
        pieces = stream.new_cache()
        for start in range(0, len(keys), size):
            pieces.append(keys[start : start + size], values[start : start + size])
        assert_same_observables(pieces.all_observables(), whole.all_observables(), f"after appends of {size} tokens each")


@law("LAW-07")
def interleaved_calls_equal_separate_calls(stream: LawAdapter) -> None:
    def run(order: str) -> list[dict[str, Any]]:
        first = stream.new_cache()
        streams = {"a": first, "b": first.sibling()}
        done = {"a": 0, "b": 0}
        for name in order:
            rows, at = given[name], done[name]
            streams[name].append(rows[0][at : at + 2], rows[1][at : at + 2])
            done[name] += 2
        return [each.all_observables() for each in streams.values()]

    given = {"a": stream.tokens(8), "b": stream.tokens(8)}
    in_turn = run("aaaabbbb")
    for order in ("abababab", "bbaabbaa"):
        for got, want in zip(run(order), in_turn, strict=True):
            assert_same_observables(got, want, f"after calls in the order {order}")


# The sizes that are numbers of tokens, which an implementation may copy or keep at once.
CONTAINERS = (
    "block_size",
    "tokens_per_block",
    "initial_capacity",
    "tail_length",
    "warm_length",
    "residual",
    "window",
    "capacity",
)
LARGEST_EDGE = 200  # tokens


def container_sizes(stream: LawAdapter) -> list[int]:
    """The numbers of tokens that a block, a tail, a group, the initial capacity and the cache contain, up to LARGEST_EDGE."""
    sizes = {size for name in CONTAINERS if isinstance(size := stream.config.get(name), int)} | {stream.room()}
    return sorted(size for size in sizes if size <= LARGEST_EDGE)


@law("LAW-08")
def appended_arrays_may_be_overwritten(stream: LawAdapter) -> None:
    """Appends as many tokens as a block, a tail, a group, the initial capacity or the cache contains, one less and one more.

    Appends them again after `clear`, when a buffer of their size is there already.
    """
    subject = stream.subject
    subject.require_same_process()
    wanted = {MANY_TOKENS, *(edge + by for edge in container_sizes(stream) for by in (-1, 0, 1))}
    for count in sorted({subject.size("tokens", each) for each in wanted if 0 < each <= stream.room()}):
        assert_whole_appends_kept(stream, count, "whose input arrays were not overwritten")
        fresh = stream.new_cache()
        fresh.require_room(count)
        for when in ("", "after clear, "):
            keys, values = stream.tokens(count)
            own_keys, own_values = (subject.to_own_array(fresh.to_cache_layout(part)) for part in (keys, values))
            fresh.append_arrays(own_keys, own_values)
            own_keys.fill(77.0)
            own_values.fill(77.0)
            assert_reads(
                subject,
                fresh.read(),
                fresh.expected(keys, values),
                f"{when}{count} tokens whose input arrays were overwritten later",
            )
            try:
                fresh.clear()
            except NotOffered:
                break


@law("LAW-09")
def equal_calls_return_equal_bits(stream: LawAdapter) -> None:
    first, keys, values = fill_stream(stream)
    second = stream.new_cache()
    second.append(keys, values)
    assert_same_observables(second.all_observables(), first.all_observables(), "after the same calls on a second cache")


@law("LAW-13ab")
def append_of_no_tokens_changes_nothing(stream: LawAdapter) -> None:
    for count in (0, MANY_TOKENS):
        empty = stream.new_cache()
        empty.append(*stream.tokens(count))
        before = empty.all_observables()
        empty.append(*stream.tokens(0))
        assert_same_observables(empty.all_observables(), before, f"after an append of 0 tokens to {count}")


@law("LAW-14")
def non_finite_tokens_never_read_back_finite(stream: LawAdapter) -> None:
    assert_never_finite(stream, np.nan, np.inf, -np.inf, *NANS[3:5])
    if (own := stream.config.get("dtype")) in PLAIN_FORMATS:
        for dtype in (each for each in PLAIN_FORMATS if each != own):
            with suppress(NotOffered):
                assert_never_finite(stream, *NANS[2:4], dtype=dtype)


def assert_never_finite(stream: LawAdapter, *numbers: float, **changes: Any) -> None:
    """Raises ClauseViolation unless a token with a NaN or an infinity raises NonFinite or is read back with one."""
    for bad, (part, which) in product(numbers, enumerate(("keys", "values"))):
        stream, _, _ = fill_stream(stream.new_cache(**changes), 2)
        token = stream.tokens(1)
        token[part][0, -1, -1] = bad
        before, what = stream.all_observables(), f"{bad} in {which} ({np.float32(bad).view(np.uint32):#x})"
        try:
            stream.append(*token)
        except NotOffered:
            raise
        except Exception as error:
            if "NonFinite" not in error_kinds(error):
                raise ClauseViolation(what, "NonFinite or no error", f"{type(error).__name__}: {error}") from error
            assert_same_observables(stream.all_observables(), before, f"after {what} was rejected")
            continue
        if np.isfinite(got := stream.read()[part][-1, -1, -1]):
            raise ClauseViolation(f"a token that was appended with {what}", "a value that is not finite", repr(float(got)))


@law("LAW-15")
def append_accepts_views(stream: LawAdapter) -> None:
    subject = stream.subject
    subject.require_same_process("views of memory")

    def strided(array: NDArray) -> OwnArray:
        return strided_view(subject, array)

    def transposed(array: NDArray) -> OwnArray:
        turned = subject.to_own_array(np.ascontiguousarray(np.swapaxes(array, -1, -2))).array
        if not hasattr(turned, "mT"):
            raise NotOffered("transposed views (.mT)")
        return OwnArray(turned.mT)

    for view in (strided, transposed):
        fresh, (keys, values) = stream.new_cache(), stream.tokens(subject.size("tokens", MANY_TOKENS))
        fresh.require_room(len(keys))
        assert_whole_appends_kept(stream, len(keys), "whose input arrays are no views")
        fresh.append_arrays(view(fresh.to_cache_layout(keys)), view(fresh.to_cache_layout(values)))
        assert_reads(stream.subject, fresh.read(), fresh.expected(keys, values), f"tokens appended as {view.__name__} views")
