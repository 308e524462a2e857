"""KIVI-01 to 09: which numbers share a scale, which tokens are quantized at each length, and which truncations succeed."""

from itertools import accumulate, cycle

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.channels.model import Channels
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import PLAIN_FORMATS, bits_of, group_of
from kvref_conformance.oracle.formats.kivi import KIVI_FORMATS, cache_bytes, quantized_counts
from kvref_conformance.oracle.formats.kivi import expected_reads as read_as
from kvref_conformance.oracle.formats.per_group import scale_dtype
from kvref_conformance.oracle.formats.small_floats import MAX, round_to
from kvref_conformance.testlib.assertions import (
    assert_equal,
    assert_pair,
    assert_reads,
    assert_same,
    assert_within,
    expected_attention,
    may_raise,
    normal_rows,
    raises,
)
from kvref_conformance.testlib.fixtures import (
    construct,
    new_object,
    random_pair,
    require_sizes,
    round_to_input_dtype,
    supported_formats,
    supports,
)
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.session import Session

LOUD, QUIET = np.float32(2.0**4), np.float32(2.0**-4)  # factors
SIZES = ("residual", "format", "dtype")
LARGEST = MAX | {"float32": float(np.finfo(np.float32).max)}
Pair = tuple[NDArray, NDArray]


class ChannelsFixture(Session):
    """A cache of one format. Unless `sizes` contains others, head_dim and residual are multiples of the format's group."""

    model: Channels

    def __init__(self, subject: Subject, format: str, residuals: int = 1, **sizes: object) -> None:
        self.group = group_of(format)
        residual = subject.size("residual", residuals * self.group)
        heads = 2 if self.group == 32 else 1
        least = {"num_kv_heads": heads, "head_dim": self.group, "residual": residual, "max_tokens": 3 * residual + 16}
        super().__init__(subject, lambda: new_object(subject, "channels", **least | {"format": format} | sizes))
        self.config = self.cache.config
        self.residual, self.row = self.config["residual"], (self.config["num_kv_heads"], self.config["head_dim"])

    def __len__(self) -> int:
        return len(self.model)

    def random_tokens(self, count: int, factor: np.float32 | int = 1) -> Pair:
        """Random keys in which one channel in five is loud, and values, times a factor. Raises NotOffered if they do not fit."""
        require_sizes(self.cache, max_tokens=len(self) + count)
        keys, values = random_pair(self.subject, count, *self.row)
        keys[:, :, ::5] *= LOUD
        return round_to_input_dtype(self.subject, keys * factor), round_to_input_dtype(self.subject, values * factor)

    def append(self, count: int, *parts: int, factor: np.float32 | int = 1) -> None:
        """Appends `count` random tokens, as `append_tokens` does."""
        self.append_tokens(self.random_tokens(count, factor), *parts)

    def append_tokens(self, tokens: Pair, *parts: int) -> None:
        """Appends tokens in calls of these numbers of tokens, followed by one call with the rest. Looks after the last one."""
        stops = *accumulate(parts), len(tokens[0])
        for start, stop in zip((0, *stops), stops, strict=False):
            self.cache.append(*(part[start:stop] for part in tokens))
        self.look()

    def read(self) -> Pair:
        keys, values = self.cache.read(list(range(len(self))))
        return keys, values


def format_per_width(subject: Subject) -> list[str]:
    """Returns one format per number of bits, chosen at random per check, with groups of 32 if possible."""
    supported = supported_formats(subject, "format", *KIVI_FORMATS)
    small = [name for name in supported if group_of(name) == 32 and supports(subject, "head_dim", 32)] or supported
    candidates = [[name for name in small if bits_of(name) == bits] for bits in (8, 4, 2)]
    return [str(subject.rng.choice(names)) for names in candidates if names]


def narrow_format(subject: Subject) -> str:
    return format_per_width(subject)[-1]


@check("KIVI-01abc", "channels")
def append_quantizes_keys_along_tokens_and_values_along_head_dim(subject: Subject) -> None:
    for name in format_per_width(subject):
        run = ChannelsFixture(subject, name)
        room = run.config["max_tokens"] - run.residual
        assert_quantized(run, max(3, min(run.group + 1, room)))  # to the second group if the limits allow it


@check("KIVI-01ab", "channels")
def append_forms_groups_as_long_as_the_format_says(subject: Subject) -> None:
    for group in (64, 128):
        names = [name for name in supported_formats(subject, "format", *KIVI_FORMATS) if group_of(name) == group]
        if names and supports(subject, "head_dim", group):
            assert_quantized(ChannelsFixture(subject, str(subject.rng.choice(names))), group + 1)


def assert_quantized(run: ChannelsFixture, more: int) -> None:
    """Appends `more` tokens past the residual, and compares what is read with the formula, without the model."""
    tokens = run.random_tokens(run.residual + more)
    run.append_tokens(tokens)
    want = read_as(*tokens, *(run.config[size] for size in SIZES))
    assert_reads(run.subject, run.read(), want, f"{len(run)} {run.config['format']} tokens")


@check("KIVI-01abc", "channels")
def append_gives_each_group_a_scale_of_its_own(subject: Subject) -> None:
    """Keys are large in the first group of tokens, values are small in half of their elements."""
    for name in format_per_width(subject):
        run = ChannelsFixture(subject, name, residuals=2, head_dim=2 * group_of(name))
        keys, values = run.random_tokens(run.residual + run.group)
        keys[: run.group] *= LOUD
        values[:, :, run.group :] *= QUIET
        run.append_tokens((round_to_input_dtype(subject, keys), round_to_input_dtype(subject, values)))


@check("KIVI-01c", "channels")
def append_gives_heads_and_keys_and_values_scales_of_their_own(subject: Subject) -> None:
    for name in format_per_width(subject):
        run = ChannelsFixture(subject, name)
        keys, values = run.random_tokens(2 * run.residual)
        keys[:, -1] *= QUIET
        run.append_tokens((round_to_input_dtype(subject, keys), round_to_input_dtype(subject, values * QUIET)))


@check("KIVI-02ab", "channels")
def quantized_keys_and_values_follow_from_the_length(subject: Subject) -> None:
    run = ChannelsFixture(subject, narrow_format(subject), residuals=2)
    for edge in sorted({run.residual, run.residual + run.group, 2 * run.residual}):
        for length in (edge - 1, edge, edge + 1):
            run.cache.append(*run.random_tokens(length - len(run)))
            want = quantized_counts(length, run.residual)
            got = run.cache.quantized_keys, run.cache.quantized_values
            assert_equal(got, (want.keys, want.values), f"quantized_keys and quantized_values at {length} tokens")


@check("KIVI-02abc", "channels")
def append_keeps_the_newest_tokens_in_full(subject: Subject) -> None:
    """Quantization changes every older token. A token that reads as it was appended is therefore not quantized."""
    for dtype in supported_formats(subject, "dtype", *PLAIN_FORMATS):
        run = ChannelsFixture(subject, narrow_format(subject), residuals=2, dtype=dtype)
        tokens = run.random_tokens(2 * run.residual)
        for length in (run.residual - 1, run.residual, run.residual + 1, 2 * run.residual - 1, 2 * run.residual):
            run.append_tokens((tokens[0][len(run) : length], tokens[1][len(run) : length]))
            for name, got, part, count in zip(
                ("keys", "values"), run.read(), tokens, quantized_counts(length, run.residual), strict=True
            ):
                want = round_to(part[:length], dtype)
                assert_same(got[count:], want[count:], f"unquantized {name} from position {count} of {length} tokens in {dtype}")
                unchanged = int((got[:count] == want[:count]).all(axis=(1, 2)).sum())
                assert_equal(unchanged, 0, f"number of {name} that must be quantized but read back unchanged, at {length} tokens")


@check("KIVI-03b", "channels")
def append_leaves_quantized_groups_as_they_are(subject: Subject) -> None:
    for name in format_per_width(subject):
        run = ChannelsFixture(subject, name)
        run.append(run.residual + 1)
        keys, values = run.read()
        for count in (1, run.residual - 1, 1, run.residual):
            run.append(count, factor=LOUD)
            got, what = run.read(), f"in {name}, read again at {len(run)} tokens"
            assert_same(got[0][: run.residual], keys[: run.residual], f"the first quantized keys {what}")
            assert_same(got[1][:1], values[:1], f"the first quantized value {what}")


@check("KIVI-03a", "channels")
def append_quantizes_the_tokens_that_were_stored_in_full(subject: Subject) -> None:
    for dtype in supported_formats(subject, "dtype", *PLAIN_FORMATS):
        for parts in (lambda residual: (), lambda residual: (residual - 1, 1, 1)):
            run = ChannelsFixture(subject, narrow_format(subject), dtype=dtype)
            run.append(2 * run.residual + 2, *parts(run.residual))


@check("KIVI-04", "channels")
def append_in_several_calls_stores_what_one_call_does(subject: Subject) -> None:
    subject.require_size(tokens=2)
    dtypes = cycle(supported_formats(subject, "dtype", "bfloat16", "float16", "float32"))
    for name, dtype in zip(format_per_width(subject), dtypes, strict=False):
        whole = ChannelsFixture(subject, name, residuals=2, dtype=dtype)
        residual, tokens = whole.residual, whole.random_tokens(2 * whole.residual + 3)
        whole.append_tokens(tokens)
        for parts in ((residual - 1, 2), (1, residual, residual), (5,) * (len(whole) // 5), (residual, 1, 1)):
            other = ChannelsFixture(subject, name, residuals=2, dtype=dtype)
            other.append_tokens(tokens, *parts)
            assert_pair(other.read(), whole.read(), f"{name} tokens appended in calls of {parts}, compared with one append")


@check("KIVI-05ab", "channels")
def memory_bytes_follow_from_the_length(subject: Subject) -> None:
    for name in format_per_width(subject):
        for dtype in supported_formats(subject, "dtype", *PLAIN_FORMATS)[-2:]:
            run, length = ChannelsFixture(subject, name, dtype=dtype), 0
            for count in (0, 3, run.residual - 3, 1, 5):
                run.cache.append(*run.random_tokens(count))
                length += count
                assert_equal(run.cache.length, length, "length")
                want = cache_bytes(length, *run.row, *(run.config[size] for size in SIZES))
                assert_equal(run.cache.memory_bytes, want, f"memory_bytes of {length} {name} tokens")


@check("KIVI-06a", "channels")
def append_of_numbers_that_are_not_finite_raises(subject: Subject) -> None:
    for dtype in supported_formats(subject, "dtype", *PLAIN_FORMATS):
        numbers = [np.nan, np.inf, -np.inf]
        numbers += [7e4] if dtype == "float16" and subject.dtype != "float16" else []  # a float16 token cannot be that large
        wide = (name for name in format_per_width(subject) if scale_dtype(name) != "float16")
        run = ChannelsFixture(subject, next(wide, None) or narrow_format(subject), dtype=dtype)
        run.append(run.residual - 1)
        for number in numbers:
            for part in (0, 1):
                tokens = run.random_tokens(1)
                tokens[part][0, -1, -1] = number
                with raises("NonFinite"):
                    run.cache.append(*tokens)
                run.look()
        run.append(2)


@check("KIVI-06b", "channels")
def append_succeeds_after_large_tokens_were_accepted(subject: Subject) -> None:
    dtype = supported_formats(subject, "dtype", "float32", "bfloat16", "float16")[0]
    for name in format_per_width(subject):
        for large in dict.fromkeys(min(LARGEST[subject.dtype], each) for each in (np.inf, 2.0**125, 1e5)):
            run = ChannelsFixture(subject, name, dtype=dtype)
            token = round_to_input_dtype(subject, np.full((1, *run.row), large))
            token[..., ::2] *= -1
            with may_raise("NonFinite"):
                run.cache.append(token, token)
            for count in (run.residual - 2, 1, 1, run.residual):
                run.append(count, factor=QUIET)
                for part in run.read():
                    assert_equal(bool(np.isfinite(part).all()), True, f"whether accepted {name} tokens read back finite")


@check("KIVI-07ab", "channels")
def append_of_more_tokens_than_fit_raises(subject: Subject) -> None:
    run = ChannelsFixture(subject, narrow_format(subject))
    most = run.config["max_tokens"]
    run.append(most - 1)
    for count in (2, run.residual + 1):
        if subject.size("tokens", count) == count:  # in one call: of several, the first would succeed
            with raises("CapacityExceeded"):
                run.cache.append(*random_pair(subject, count, *run.row))
            run.look()
    run.append(1)
    assert_equal(run.cache.length, most, "length of a full cache")
    with raises("CapacityExceeded"):
        run.cache.append(*random_pair(subject, 1, *run.row))
    run.look()


@check("KIVI-09ab", "channels")
def new_with_sizes_that_are_no_multiple_of_the_group_raises(subject: Subject) -> None:
    run, tried = ChannelsFixture(subject, narrow_format(subject)), 0
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
def new_with_multiples_of_the_group_succeeds(subject: Subject) -> None:
    config = ChannelsFixture(subject, narrow_format(subject)).config
    for name in ("residual", "head_dim"):
        for times in (2, 3):
            if supports(subject, name, times * config[name]):
                construct(subject, "channels", **config | {name: times * config[name]})


@check("ATTN-10", "channels")
def attend_uses_the_values_that_read_returns(subject: Subject) -> None:
    for name in format_per_width(subject):
        run = ChannelsFixture(subject, name)
        run.append(run.residual + 5)
        heads, dim = run.row
        query, scale = normal_rows(subject, 2, heads * subject.size("group_size", 2), dim), 2.0**-6 / dim
        want, bound = expected_attention(subject, query, *run.read(), scale=scale)
        assert_within(run.cache.attend(query, scale), want, bound, f"attention over {len(run)} {name} tokens")


# KIVI-08 and EDIT-01 to 03: `truncate`, which may raise NotTruncatable where tokens are quantized.


def truncate_and_append(run: ChannelsFixture, length: int, count: int) -> None:
    """Truncates, and appends louder tokens, so that an old scale would show."""
    run.cache.truncate(length)
    run.append(count, factor=LOUD)


@check("KIVI-08ab", "channels")
def truncate_succeeds_while_the_residual_was_never_full(subject: Subject) -> None:
    for name in format_per_width(subject):
        run = ChannelsFixture(subject, name)
        run.append(run.residual - 1)
        for length, count in ((run.residual - 4, 3), (2, 2 * run.residual), (0, run.residual + 1)):
            truncate_and_append(run, length, count)


@check("KIVI-08ab", "channels")
def truncate_removes_drafts_of_up_to_rollback_tokens(subject: Subject) -> None:
    """Drafts at every phase of the residual. A cache to which only the other tokens were appended reads the same."""
    subject.require_size(rollback=1)
    for rollback in (3, 1):
        run = ChannelsFixture(subject, narrow_format(subject), rollback=rollback)
        draft, residual = min(run.config["rollback"], run.residual), run.residual
        for length in (residual - 1, residual, residual + 1, residual + draft, 2 * residual, 2 * residual + 1):
            run.append(length - len(run) + draft)
            run.cache.truncate(length)
            run.look()
            other = construct(subject, "channels", **run.config)
            other.append(run.model.keys, run.model.values)
            assert_pair(run.read(), other.read(list(range(length))), f"{length} tokens after a draft of {draft} was truncated")
        run.append(residual, factor=LOUD)


@check("KIVI-08abc", "channels")
def truncate_to_quantized_tokens_restores_them_or_raises(subject: Subject) -> None:
    for name in format_per_width(subject):
        run = ChannelsFixture(subject, name)
        run.append(2 * run.residual + 3)
        for length in (2 * run.residual + 1, 2 * run.residual, run.residual + 1, run.residual, 1):
            if length < len(run):
                with may_raise("NotTruncatable"):
                    run.cache.truncate(length)
                run.look()
                if len(run) == length:
                    run.append(2, factor=LOUD)
        truncate_and_append(run, 0, run.residual + 1)
