"""Checks of KIVI-01 to 07 and 09: which numbers share a scale, and which tokens are quantized at each length."""

from itertools import cycle

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.channels.fixture import LOUD, QUIET, ChannelsFixture, one, some
from kvref_conformance.oracle.formats import PLAIN, group_of
from kvref_conformance.oracle.formats.kivi import FORMATS, cache_bytes, counts
from kvref_conformance.oracle.formats.per_group import scale_dtype
from kvref_conformance.oracle.formats.small_floats import MAX, round_to
from kvref_conformance.outcome import Broken, NotOffered
from kvref_conformance.testlib.assertions import (
    assert_equal,
    assert_pair,
    assert_same,
    assert_within,
    expected_attention,
    may_raise,
    normal,
    raises,
)
from kvref_conformance.testlib.fixtures import construct, formats_of, pair_of_tokens, round_to_input_dtype, supports
from kvref_conformance.testlib.registry import check

SIZES = ("residual", "format", "dtype")
LARGEST = MAX | {"float32": float(np.finfo(np.float32).max)}


@check("KIVI-01abc", "channels")
def keys_share_a_scale_along_tokens_and_values_along_head_dim(subject: Subject) -> None:
    for name in some(subject):
        run = ChannelsFixture(subject, name)
        run.append(run.residual + 3)
        run.holds("after one append")


@check("KIVI-01ab", "channels")
def a_group_is_as_long_as_its_format_says(subject: Subject) -> None:
    for group in (64, 128):
        names = [name for name in formats_of(subject, "format", *FORMATS) if group_of(name) == group]
        if names and supports(subject, "head_dim", group):
            run = ChannelsFixture(subject, str(subject.rng.choice(names)))
            run.append(run.residual + run.group + 1)
            run.holds("after one append")


@check("KIVI-01abc", "channels")
def a_loud_channel_and_a_loud_group_of_tokens_are_alone(subject: Subject) -> None:
    for name in some(subject):
        run = ChannelsFixture(subject, name, residuals=2, head_dim=2 * group_of(name))
        keys, values = run.tokens(run.residual + run.group)
        keys[: run.group] *= LOUD
        values[:, :, run.group :] *= QUIET
        run.give(round_to_input_dtype(subject, keys), round_to_input_dtype(subject, values))
        run.holds("with large keys in the first group of tokens and small numbers in half of each value")


@check("KIVI-01c", "channels")
def heads_and_keys_and_values_have_scales_of_their_own(subject: Subject) -> None:
    for name in some(subject):
        run = ChannelsFixture(subject, name)
        keys, values = run.tokens(2 * run.residual)
        keys[:, -1] = round_to_input_dtype(subject, keys[:, -1] * QUIET)
        run.give(keys, round_to_input_dtype(subject, values * QUIET))
        run.holds("with one head of small keys, and small values")


@check("KIVI-02ab", "channels")
def what_is_quantized_follows_from_how_many_there_are(subject: Subject) -> None:
    run = ChannelsFixture(subject, one(subject), residuals=2)
    for edge in sorted({run.residual, run.residual + run.group, 2 * run.residual}):
        for target in (edge - 1, edge, edge + 1):
            run.append(target - len(run))
            want = counts(len(run), run.residual)
            got = run.cache.quantized_keys, run.cache.quantized_values
            assert_equal(
                got,
                (want.keys, want.values),
                f"quantized_keys and quantized_values at {len(run)} tokens, with residual {run.residual}",
            )


@check("KIVI-02abc", "channels")
def the_newest_tokens_are_in_full(subject: Subject) -> None:
    for dtype in formats_of(subject, "dtype", *PLAIN):
        run = ChannelsFixture(subject, one(subject), residuals=2, dtype=dtype)
        for target in (run.residual - 1, run.residual, run.residual + 1, 2 * run.residual - 1, 2 * run.residual):
            run.append(target - len(run))
            for name, got, given, start in zip(("keys", "values"), run.read(), (run.keys, run.values), run.full(), strict=True):
                assert_same(
                    got[start:],
                    round_to(given[start:], dtype),
                    f"unquantized {name} from position {start} of {len(run)} tokens in {dtype}",
                )


@check("KIVI-02ab", "channels")
def what_is_older_is_quantized(subject: Subject) -> None:
    """Quantization changes every one of these tokens. A token that reads as it was appended is therefore not quantized."""
    run = ChannelsFixture(subject, one(subject), residuals=2)
    for target in (run.residual - 1, run.residual, run.residual + 1, 2 * run.residual):
        run.append(target - len(run))
        for name, got, given, count in zip(("keys", "values"), run.read(), (run.keys, run.values), run.full(), strict=True):
            as_it_came = int((got[:count] == given[:count]).all(axis=(1, 2)).sum())
            assert_equal(as_it_came, 0, f"number of {name} that must be quantized but read back unchanged, at {target} tokens")


@check("KIVI-03b", "channels")
def a_group_reads_the_same_whatever_comes(subject: Subject) -> None:
    for name in some(subject):
        run = ChannelsFixture(subject, name)
        run.append(run.residual + 1)
        older = run.residual, 1  # quantized keys and values
        first = run.cache.read(list(range(run.residual)))
        for count in (1, run.residual - 1, 1, run.residual):
            keys, values = run.tokens(count)
            run.give(round_to_input_dtype(subject, keys * LOUD), round_to_input_dtype(subject, values * LOUD))
            got = run.cache.read(list(range(run.residual)))
            for which, part in enumerate(("keys", "values")):
                what = f"the first quantized {part} in {name}, read again at {len(run)} tokens"
                assert_same(got[which][: older[which]], first[which][: older[which]], what)


@check("KIVI-03a", "channels")
def groups_are_made_of_what_was_held_in_full(subject: Subject) -> None:
    for dtype in formats_of(subject, "dtype", *PLAIN):
        for in_pieces in (False, True):
            run = ChannelsFixture(subject, one(subject), dtype=dtype)
            run.append(2 * run.residual + 2, *(run.residual - 1, 1, 1) if in_pieces else ())
            run.holds(f"with unquantized tokens in {dtype}")


@check("KIVI-04", "channels")
def a_prompt_leaves_what_its_tokens_leave(subject: Subject) -> None:
    subject.need(tokens=2)
    dtypes = cycle(formats_of(subject, "dtype", "bfloat16", "float16", "float32"))
    for name, dtype in zip(some(subject), dtypes, strict=False):
        whole = ChannelsFixture(subject, name, residuals=2, dtype=dtype)
        residual, keys_values = whole.residual, whole.tokens(2 * whole.residual + 3)
        whole.give(*keys_values)
        count = len(whole)
        for pieces in ((residual - 1, 2), (1, residual, residual), (5,) * (count // 5), (residual, 1, 1)):
            other = ChannelsFixture(subject, name, residuals=2, dtype=dtype)
            other.give(*keys_values, *pieces)
            assert_pair(
                other.read(), whole.read(), f"{count} {name} tokens appended in chunks of {pieces}, compared with one append"
            )


@check("KIVI-05ab", "channels")
def counts_follow_from_the_length(subject: Subject) -> None:
    for name in some(subject):
        for dtype in formats_of(subject, "dtype", *PLAIN)[-2:]:
            run = ChannelsFixture(subject, name, dtype=dtype)
            for count in (0, 3, run.residual - 3, 1, 5):
                run.append(count)
                config = (*run.row, *(run.config[each] for each in SIZES))
                assert_equal(run.cache.length, len(run), "length")
                assert_equal(run.cache.memory_bytes, cache_bytes(len(run), *config), f"memory_bytes of {len(run)} {name} tokens")


@check("KIVI-06a", "channels")
def what_is_not_finite_in_full_is_refused_when_it_comes(subject: Subject) -> None:
    for dtype in formats_of(subject, "dtype", *PLAIN):
        bad = [np.nan, np.inf, -np.inf]
        bad += [7e4] if dtype == "float16" and subject.dtype != "float16" else []  # a float16 token cannot be that large
        name = next((each for each in some(subject) if scale_dtype(each) != "float16"), one(subject))
        run = ChannelsFixture(subject, name, dtype=dtype)
        run.append(run.residual - 1)
        before = run.read()
        for number in bad:
            for which in (0, 1):
                given = run.tokens(1)
                given[which][0, -1, -1] = number
                with raises("NonFinite"):
                    run.cache.append(*given)
                run.is_still(before, f"after a token with {number} raised NonFinite in a cache of {dtype}")
        run.append(2)
        run.as_if_new("after tokens that raised NonFinite")


@check("KIVI-06b", "channels")
def what_was_taken_makes_no_later_append_fail(subject: Subject) -> None:
    for name in some(subject):
        for large in dict.fromkeys(min(LARGEST[subject.dtype], each) for each in (np.inf, 2.0**125, 1e5)):
            run = ChannelsFixture(subject, name, dtype=_widest(subject))
            keys, values = (round_to_input_dtype(subject, np.full(part.shape, large)) for part in run.tokens(1))
            keys[..., ::2] *= -1
            values[..., ::2] *= -1
            try:
                with may_raise("NonFinite"):
                    run.give(keys, values)
            finally:
                taken = run.cache.length
            assert_equal(taken, len(run), f"length after append of a token of {large:g}")
            for count in (run.residual - 2, 1, 1, run.residual):
                quiet = [round_to_input_dtype(subject, part * QUIET) for part in run.tokens(count)]
                try:
                    run.give(quiet[0], quiet[1])
                except NotOffered:
                    raise
                except Broken:
                    raise
                except Exception as error:
                    what = f"an append after {taken} accepted tokens of {large:g}"
                    raise Broken(what, "no error", f"{type(error).__name__}: {error}") from error
                for part in run.read():
                    assert_equal(bool(np.isfinite(part).all()), True, f"whether accepted {name} tokens read back finite")


def _widest(subject: Subject) -> str:
    return formats_of(subject, "dtype", "float32", "bfloat16", "float16")[0]


@check("KIVI-07ab", "channels")
def it_is_filled_to_the_last_token_and_no_further(subject: Subject) -> None:
    run = ChannelsFixture(subject, one(subject))
    run.append(run.config["max_tokens"])
    assert_equal(run.cache.length, run.config["max_tokens"], "length of a full cache")
    before = run.read()
    with raises("CapacityExceeded"):
        run.cache.append(*pair_of_tokens(subject, 1, *run.row))
    run.is_still(before, "after an append to a full cache raised CapacityExceeded")


@check("KIVI-07ab", "channels")
def tokens_that_do_not_all_fit_are_not_appended(subject: Subject) -> None:
    run = ChannelsFixture(subject, one(subject))
    run.append(run.config["max_tokens"] - 1)
    before = run.read()
    for count in (2, run.residual + 1):
        with raises("CapacityExceeded"):
            run.cache.append(*pair_of_tokens(subject, count, *run.row))
        run.is_still(before, f"after an append of {count} tokens with room for one raised CapacityExceeded")
    run.append(1)
    assert_equal(run.cache.length, run.config["max_tokens"], "length of a full cache")


@check("KIVI-09ab", "channels")
def sizes_that_no_group_goes_into_are_refused(subject: Subject) -> None:
    run, tried = ChannelsFixture(subject, one(subject)), 0
    with raises("ConfigError"):
        subject.new("channels", **run.config | {"format": run.config["format"].removeprefix("u")})
    for name in ("residual", "head_dim"):
        for size in (run.config[name] + 1, run.config[name] // 2 + 1, run.config[name] + run.group // 2):
            if supports(subject, name, size):
                with raises("ConfigError"):
                    subject.new("channels", **run.config | {name: size})
                tried += 1
    if not tried:
        raise NotOffered("sizes that are not multiples of a group")


@check("KIVI-09c", "channels")
def sizes_that_groups_go_into_are_taken(subject: Subject) -> None:
    run = ChannelsFixture(subject, one(subject))
    for name in ("residual", "head_dim"):
        for times in (2, 3):
            if supports(subject, name, times * run.config[name]):
                construct(subject, "channels", **run.config | {name: times * run.config[name]})


# Checks of ATTN-10: attention over the values that the cache reads as.


@check("ATTN-10", "channels")
def attention_is_over_quantized_tokens_and_those_in_full(subject: Subject) -> None:
    for name in some(subject):
        run = ChannelsFixture(subject, name)
        run.append(run.residual + 5)
        heads, dim = run.row
        query, scale = normal(subject, 2, heads * subject.size("group_size", 2), dim), 2.0**-6 / dim
        want, bound = expected_attention(subject, query, *run.cache.read(list(range(len(run)))), scale=scale)
        assert_within(run.cache.attend(query, scale), want, bound, f"attention over {len(run)} {name} tokens")


# Checks of KIVI-08 and EDIT-01 to 03: `truncate`, which may raise NotTruncatable where tokens are quantized.


def goes_back(run: ChannelsFixture, length: int) -> bool:
    """Truncates. Returns False if the cache raises NotTruncatable."""
    with may_raise("NotTruncatable"):
        run.truncate(length)
        return True
    return False


def refilled(run: ChannelsFixture, length: int, count: int) -> None:
    """Appends `count` louder tokens. Raises Broken unless the cache reads as one that never had the truncated tokens."""
    keys, values = run.tokens(count)
    run.give(round_to_input_dtype(run.subject, keys * LOUD), values)
    run.as_if_new(f"after truncate({length}) and an append of {count}")


@check("EDIT-01abc", "channels")
def the_first_tokens_stay(subject: Subject) -> None:
    run = ChannelsFixture(subject, one(subject))
    run.append(run.residual - 1)
    for length in (run.residual - 2, 3, 0):
        before = run.cache.read(list(range(length)))
        run.truncate(length)
        run.is_still(before, f"after truncate({length})")
        for position in (length, run.residual - 2):
            with raises("PositionOutOfRange"):
                run.cache.read([position])


@check("EDIT-02ab", "channels")
def no_more_tokens_stay_than_there_are(subject: Subject) -> None:
    run = ChannelsFixture(subject, one(subject))
    run.append(run.residual + 2)
    before = run.read()
    for length in subject.integers(len(run) + 1, run.config["max_tokens"] + 1, -1, -len(run)):
        with raises("PositionOutOfRange"):
            run.cache.truncate(length)
        run.is_still(before, f"after truncate({length}) raised PositionOutOfRange")
    run.truncate(len(run))
    run.is_still(before, "after truncate to the current length")


@check("KIVI-08ab", "channels")
def all_goes_while_the_residual_was_never_full(subject: Subject) -> None:
    for name in some(subject):
        run = ChannelsFixture(subject, name)
        run.append(run.residual - 1)
        run.truncate(run.residual - 4)
        refilled(run, run.residual - 4, 3)
        run.truncate(2)
        refilled(run, 2, 2 * run.residual)
        run.truncate(0)
        refilled(run, 0, run.residual + 1)


@check("KIVI-08ab", "channels")
def a_draft_goes_back(subject: Subject) -> None:
    """Truncates drafts of up to `rollback` tokens at every phase of the residual."""
    subject.need(rollback=1)
    for rollback in (3, 1):
        run = ChannelsFixture(subject, one(subject), rollback=rollback)
        draft, residual = min(run.config["rollback"], run.residual), run.residual
        for target in (residual - 1, residual, residual + 1, residual + draft, 2 * residual, 2 * residual + 1):
            run.append(target - len(run) + draft)
            run.truncate(target)
            run.as_if_new(f"after a draft of {draft} tokens was truncated")
        refilled(run, len(run), residual)


@check("KIVI-08abc", "channels")
def what_cannot_go_back_says_so(subject: Subject) -> None:
    for name in some(subject):
        run = ChannelsFixture(subject, name)
        run.append(2 * run.residual + 3)
        for length in (2 * run.residual + 1, 2 * run.residual, run.residual + 1, run.residual, 1):
            before = run.read()
            if length < len(run) and goes_back(run, length):
                refilled(run, length, 2)
            else:
                run.is_still(before, f"after truncate({length}) raised NotTruncatable")
        run.truncate(0)
        refilled(run, 0, run.residual + 1)


@check("EDIT-03", "channels")
def what_follows_is_as_if_nothing_had_gone(subject: Subject) -> None:
    for name in some(subject):
        run = ChannelsFixture(subject, name)
        run.append(run.residual - 2)
        for length, count in ((run.residual - 4, 1), (5, 1)):
            run.truncate(length)
            refilled(run, length, count)
        refilled(run, 5, run.residual)
        run.cache.clear()
        assert_equal(run.cache.length, 0, "length after clear")
        run.truncate(0)
        run.keys, run.values = run.keys[:0], run.values[:0]
        refilled(run, 0, run.residual + 2)
