"""Checks of the chapter COMPR."""

from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.testlib.assertions import assert_equal, assert_same, assert_within, may_raise, raises
from kvref_conformance.testlib.fixtures import new_object, random_tokens, require_sizes, supports
from kvref_conformance.testlib.law_adapter import unknown_ids
from kvref_conformance.testlib.production_sizes import affordable_tokens
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.session import Session

OBSERVED = ("length", "read_window", "read_rows", "read_state")
Arrays = tuple[NDArray, NDArray, NDArray]


class CompressedFixture(Session):
    """A cache with one sequence."""

    def __init__(self, subject: Subject, count: int = 0, **sizes: Any) -> None:
        super().__init__(subject, **sizes)
        self.config = self.cache.config
        self.ratio, self.window, self.dim = (self.config[name] for name in ("ratio", "window", "head_dim"))
        self.sequence = int(self.cache.create())
        self.append(self.sequence, count)

    def tokens(self, count: int) -> Arrays:
        latents, contributions, gates = (random_tokens(self.subject, count, 1, self.dim)[:, 0] for _ in range(3))
        return latents, contributions, gates

    def append(self, sequence: int, count: int) -> Arrays:
        new = self.tokens(count)
        self.append_these(sequence, *new)
        return new

    def append_these(self, sequence: int, *new: NDArray) -> None:
        step = self.subject.size("tokens", max(1, count := len(new[0])))
        for start in range(0, count, step):
            self.cache.append(sequence, *(part[start : start + step] for part in new))

    def truncate_to_every_shorter_length(self, sequence: int) -> None:
        """Truncate by one token until none remains, or raise NotTruncatable, and judge all contents after each truncate."""
        for length in reversed(range(self.cache.length(sequence))):
            with may_raise("NotTruncatable"):
                self.cache.truncate(sequence, length)
            self.see()

    def see(self) -> None:
        """Judge all contents."""
        self.look(*OBSERVED)


def constant(fixture: CompressedFixture, *numbers: float) -> Arrays:
    """Tokens whose latents and contributions have one number each, and whose gates are all 0."""
    rows = np.repeat(np.array(numbers, np.float32)[:, None], fixture.dim, axis=1)
    return rows, rows, 0 * rows


@check("COMPR-01abc", "compressed")
def append_fills_window_rows_and_state(subject: Subject) -> None:
    fixture = CompressedFixture(subject)
    cache, sequence, parts = fixture.cache, fixture.sequence, [fixture.tokens(0)]
    for count in range(1, 3 * fixture.ratio + 2):
        parts.append(fixture.append(sequence, 1))
        latents, contributions, gates = (np.concatenate(each) for each in zip(*parts, strict=True))
        assert_equal(cache.length(sequence), count, f"length after {count} tokens")
        assert_same(cache.read_window(sequence), latents[max(0, count - fixture.window + 1) :], f"window after {count} tokens")
        open_at = count // fixture.ratio * fixture.ratio
        got = cache.read_state(sequence)
        assert_same(got[0], contributions[open_at:], f"contributions of the incomplete group after {count} tokens")
        assert_same(got[1], gates[open_at:], f"gates of the incomplete group after {count} tokens")
        assert_equal(np.shape(cache.read_rows(sequence)), (count // fixture.ratio, fixture.dim), f"rows after {count} tokens")


@check("COMPR-01d", "compressed")
def append_of_uneven_arrays_changes_nothing(subject: Subject) -> None:
    fixture = CompressedFixture(subject, 2)
    good = fixture.tokens(2)
    for at in range(3):
        longer, wider = np.concatenate([good[at], good[at][:1]]), np.zeros((2, fixture.dim + 1), np.float32)
        for wrong in (good[at][:1], longer, good[at][0], good[at][:, None], wider):
            with raises("ShapeMismatch"):
                fixture.cache.append(fixture.sequence, *good[:at], wrong, *good[at + 1 :])
    fixture.see()


@check("COMPR-02a", "compressed")
def rows_are_gated_sums(subject: Subject) -> None:
    fixture = CompressedFixture(subject)
    latents, contributions, gates = fixture.tokens(fixture.ratio)
    fixture.cache.append(fixture.sequence, latents, contributions, gates)
    plain = fixture.dim - fixture.config["rope_dim"]
    weights = np.exp(gates.astype(np.float64) - gates.max(axis=0))
    want = (weights * contributions).sum(axis=0) / weights.sum(axis=0)
    bound = np.full(fixture.dim, 1e-4 * np.abs(contributions).max())  # far above rounding; the model has the derived bound
    assert_within(np.asarray(fixture.cache.read_rows(fixture.sequence))[0, :plain], want[:plain], bound[:plain], "the row")
    fixture.see()


@check("COMPR-02b", "compressed")
def rows_are_rotated_for_their_first_token(subject: Subject) -> None:
    fixture = CompressedFixture(subject, max_tokens=200)
    dim, ratio, rotated = fixture.dim, fixture.ratio, fixture.config["rope_dim"]
    if not rotated:
        raise NotOffered("a rope_dim greater than 0")
    count = min(5, fixture.config["max_tokens"] // ratio)
    # Each pair of a row is (1, 0) before the rotation, and the other numbers are 1.
    row = np.ones(dim, np.float32)
    row[dim - rotated + 1 :: 2] = 0
    rows = np.repeat(row[None], count * ratio, axis=0)
    fixture.cache.append(fixture.sequence, rows, rows, np.zeros_like(rows))
    got = np.asarray(fixture.cache.read_rows(fixture.sequence))
    for group in range(count):
        angles = [group * ratio * 160_000.0 ** (-pair / rotated) for pair in range(0, rotated, 2)]
        turned = np.array([part for angle in angles for part in (np.cos(angle), np.sin(angle))])
        want = np.concatenate([np.ones(dim - rotated), turned])
        # A weighted mean of equal numbers has the roundings of ATTN-04, far below 1e-5; the rotation adds 3 * 2**-24 (kvref.rope)
        assert_within(got[group], want, np.full(dim, 1e-5), f"row {group}")
    fixture.append(fixture.sequence, 2)
    fixture.see()


@check("COMPR-02b", "compressed")
def rows_of_long_sequences_are_rotated_for_their_first_token(subject: Subject) -> None:
    """Angles of thousands of radians, which must not be computed in float32.

    All contributions of a group are equal, so that they are the row before its rotation. A float32 angle of 4096 to 8192 has an
    error of up to 2**-12, and so has its sine. Otherwise, the error is that of ATTN-04 for 128 tokens, less than 2**-15, and
    that of the rotation: 3 * 2**-24 with float64 angles (kvref.rope), and less than 2**-20 if an angle is reduced to [-pi, pi]
    exactly and then rounded to float32.
    """
    fixture = CompressedFixture(subject, head_dim=16, rope_dim=16, window=128, ratio=128, max_tokens=2**15)
    dim, ratio, rotated, length = fixture.dim, fixture.ratio, fixture.config["rope_dim"], fixture.config["max_tokens"]
    frequencies = 160_000.0 ** (-np.arange(0, rotated, 2) / max(1, rotated))
    if not (frequencies[1:] * (length - ratio) > 4096).any():  # the first frequency is 1, so that its angles are integers
        raise NotOffered("sequences in which an angle is greater than 4096")
    length = affordable_tokens(subject, length)
    row = np.ones(dim, np.float32)
    row[dim - rotated + 1 :: 2] = 0
    fixture.append_these(fixture.sequence, *(np.tile(each, (length, 1)) for each in (row, row, 0 * row)))
    angles = np.arange(length // ratio)[:, None] * ratio * frequencies
    want = np.ones((len(angles), dim))
    want[:, dim - rotated :: 2], want[:, dim - rotated + 1 :: 2] = np.cos(angles), np.sin(angles)
    got = np.asarray(fixture.cache.read_rows(fixture.sequence))
    assert_within(got, want, np.full(want.shape, 2.0**-14), f"rows of {length} tokens")


@check("COMPR-02c", "compressed")
def chunks_do_not_change_rows(subject: Subject) -> None:
    for chunks in ((1,) * 9, (2, 5, 2), (4, 4, 1), (9,), (3, 6), (1, 8)):
        fixture = CompressedFixture(subject)
        latents = fixture.tokens(sum(chunks))
        start = 0
        for count in chunks:
            fixture.cache.append(fixture.sequence, *(part[start : start + count] for part in latents))
            start += count
            fixture.see()


@check("COMPR-02c", "compressed")
def rows_do_not_depend_on_the_former_owner_of_a_block(subject: Subject) -> None:
    fixture = CompressedFixture(subject, 11, num_blocks=1)
    for count in (4, 13):
        fixture.cache.drop(fixture.sequence)
        fixture.sequence = int(fixture.cache.create())
        fixture.append(fixture.sequence, count)
        fixture.see()


@check("COMPR-03a", "compressed")
def queries_see_their_window_and_complete_groups(subject: Subject) -> None:
    for before, count in ((0, 1), (0, 12), (2, 7), (11, 3), (17, 12)):
        for heads in (1, 4):
            fixture = CompressedFixture(subject, before)
            query = random_tokens(subject, count, heads, fixture.dim)
            fixture.cache.step(fixture.sequence, query, *fixture.tokens(count), 0.25)
    # The mean of what a query sees, if all scores are 0.
    fixture = CompressedFixture(subject)
    numbers = [float(each) for each in range(1, 2 * fixture.ratio + 1)]
    silent = np.zeros((len(numbers), 1, fixture.dim), np.float32)
    got = np.asarray(fixture.cache.step(fixture.sequence, silent, *constant(fixture, *numbers)))
    if fixture.dim > fixture.config["rope_dim"]:
        for at in range(len(numbers)):
            seen = numbers[max(0, at - fixture.window + 1) : at + 1]
            groups = range(0, (at + 1) // fixture.ratio * fixture.ratio, fixture.ratio)
            seen += [float(np.mean(numbers[first : first + fixture.ratio])) for first in groups]
            want = np.array([np.mean(seen)])
            assert_within(got[at, 0, :1], want, 1e-5 * want, f"the mean of what query {at} sees")


@check("COMPR-03b", "compressed")
def step_leaves_what_append_leaves(subject: Subject) -> None:
    fixture = CompressedFixture(subject, 2)
    for count in (1, 5, 2):
        fixture.cache.step(fixture.sequence, random_tokens(subject, count, 2, fixture.dim), *fixture.tokens(count))
        fixture.see()


@check("COMPR-03c", "compressed")
def step_with_another_number_of_queries_raises(subject: Subject) -> None:
    fixture = CompressedFixture(subject, 2)
    for queries in (1, 3):
        with raises("ShapeMismatch"):
            fixture.cache.step(fixture.sequence, random_tokens(subject, queries, 1, fixture.dim), *fixture.tokens(2))
    fixture.see()


@check("COMPR-04", "compressed")
def windows_that_hide_tokens_raise(subject: Subject) -> None:
    config, tried = new_object(subject, "compressed").config, 0
    ratio, dim = config["ratio"], config["head_dim"]
    odd = (("rope_dim", each) for each in range(1, dim + 1, 2))
    for name, wrong in (("window", ratio - 2), *odd, ("rope_dim", dim // 2 * 2 + 2)):
        if wrong > 0 and supports(subject, name, wrong):
            tried += 1
            with raises("ConfigError"):
                subject.new("compressed", **config | {name: wrong})
    if not tried:
        raise NotOffered("a window or a rope_dim that is too small, too large or odd")
    if supports(subject, "window", max(1, ratio - 1)):
        fixture = CompressedFixture(subject, 2 * ratio, window=max(1, ratio - 1))
        fixture.see()


@check("COMPR-05ac", "compressed")
def truncate_restores_the_compressor_state(subject: Subject) -> None:
    for length in range(1, 13):
        fixture = CompressedFixture(subject, length)
        for back in range(min(length, fixture.config["rollback"]) + 1):
            fixture.cache.truncate(fixture.sequence, length - back)
            fixture.see()
        fixture.append(fixture.sequence, fixture.ratio)
        fixture.see()
        fixture.cache.truncate(fixture.sequence, 0)
        fixture.append(fixture.sequence, count := fixture.ratio + 1)
        for back in range(min(count, fixture.config["rollback"]) + 1):
            fixture.cache.truncate(fixture.sequence, count - back)
            fixture.see()


@check("COMPR-05bc", "compressed")
def truncate_to_any_length_restores_or_raises(subject: Subject) -> None:
    for length in range(14):
        fixture = CompressedFixture(subject, 14)
        with may_raise("NotTruncatable"):
            fixture.cache.truncate(fixture.sequence, length)
        fixture.see()
        fixture.append(fixture.sequence, 4)
        fixture.see()
        for wrong in subject.integers(-1, 40):
            with raises("PositionOutOfRange"):
                fixture.cache.truncate(fixture.sequence, wrong)


@check("COMPR-05c", "compressed")
def truncate_of_truncated_sequences_and_copies_restores_or_raises(subject: Subject) -> None:
    """Tokens that a truncate removed have overwritten older ones, of which later truncates must not read anything."""
    for removed in range(4):
        for origin in ("itself", "a fork", "a restored copy"):
            fixture = CompressedFixture(subject, 14)
            cache, sequence = fixture.cache, fixture.sequence
            with may_raise("NotTruncatable"):
                cache.truncate(sequence, 14 - removed)
            if origin == "a fork":
                sequence = int(cache.fork(sequence))
            elif origin == "a restored copy":
                sequence = int(cache.restore(cache.offload(sequence)))
            fixture.truncate_to_every_shorter_length(sequence)


@check("COMPR-06ac", "compressed")
def new_sequences_are_empty(subject: Subject) -> None:
    fixture = CompressedFixture(subject, 8, num_blocks=1)
    for count in (2, 1, 5):
        fixture.cache.drop(fixture.sequence)
        fixture.sequence = int(fixture.cache.create())
        fixture.see()
        query = random_tokens(subject, count, 1, fixture.dim)
        fixture.cache.step(fixture.sequence, query, *fixture.tokens(count))
        fixture.see()


@check("COMPR-06bcd", "compressed")
def forks_have_a_state_of_their_own(subject: Subject) -> None:
    for count in (0, 1, 5, 9, 14):
        fixture = CompressedFixture(subject, count)
        child = int(fixture.cache.fork(fixture.sequence))
        fixture.see()
        fixture.append(child, 2)
        fixture.append(fixture.sequence, 4)
        fixture.see()
        fixture.cache.drop(fixture.sequence)
        with raises("SequenceNotFound"):
            fixture.cache.read_rows(fixture.sequence)
        fixture.append(child, 3)
        fixture.see()


@check("COMPR-06d", "compressed")
def ids_of_dropped_sequences_are_not_reused(subject: Subject) -> None:
    fixture = CompressedFixture(subject, 4)
    require_sizes(fixture.cache, num_blocks=2)
    fixture.require_new_ids(fixture.cache.create)
    fixture.require_new_ids(lambda: fixture.cache.fork(fixture.sequence))


@check("COMPR-06d", "compressed")
def restore_does_not_reuse_ids(subject: Subject) -> None:
    fixture = CompressedFixture(subject, 4)
    require_sizes(fixture.cache, num_blocks=2)
    handle = fixture.cache.offload(fixture.sequence)
    fixture.require_new_ids(lambda: fixture.cache.restore(handle))


@check("COMPR-07ab", "compressed")
def restored_sequences_have_all_three_parts(subject: Subject) -> None:
    fixture = CompressedFixture(subject, 11)
    cache, sequence = fixture.cache, fixture.sequence
    window, rows = np.array(cache.read_window(sequence)), np.array(cache.read_rows(sequence))
    state = [np.array(part) for part in cache.read_state(sequence)]
    handle = cache.offload(sequence)
    fixture.append(sequence, 5)
    fixture.see()
    for owner_exists in (True, False) if cache.config["num_blocks"] > 1 else (False,):
        if not owner_exists:
            cache.drop(sequence)
        restored = int(cache.restore(handle))
        assert_same(cache.read_window(restored), window, "window of a restored sequence")
        assert_same(cache.read_rows(restored), rows, "rows of a restored sequence")
        for got, want in zip(cache.read_state(restored), state, strict=True):
            assert_same(got, want, "compressor state of a restored sequence")
        fixture.append(restored, 4)
        fixture.see()


@check("COMPR-07c", "compressed")
def discarded_copies_are_unknown(subject: Subject) -> None:
    fixture = CompressedFixture(subject, 4)
    first, second = (int(fixture.cache.offload(fixture.sequence)) for _ in range(2))
    fixture.cache.discard(first)
    for handle in (first, *(each for each in unknown_ids(subject, second) if each != first)):
        for name in ("restore", "discard"):
            with raises("KeyNotFound"):
                getattr(fixture.cache, name)(handle)
    fixture.cache.restore(second)
    fixture.see()
    handles = [first, second]
    for _ in range(3):
        handles.append(int(fixture.cache.offload(fixture.sequence)))
        fixture.cache.discard(handles[-1])
    assert_equal(len(set(handles)), len(handles), f"number of different handles among {handles}")


@check("COMPR-08ab", "compressed")
def sequences_take_one_block_each(subject: Subject) -> None:
    fixture = CompressedFixture(subject, 4, num_blocks=3)
    cache, total = fixture.cache, fixture.config["num_blocks"]
    handle = cache.offload(fixture.sequence)
    for used in range(1, total + 1):
        assert_equal(cache.num_free_blocks, total - used, f"num_free_blocks with {used} sequences")
        if used < total:
            cache.fork(fixture.sequence)
    for name, arguments in (("create", ()), ("fork", (fixture.sequence,)), ("restore", (handle,))):
        with raises("OutOfBlocks"):
            getattr(cache, name)(*arguments)
    fixture.see()
    cache.drop(fixture.sequence)
    cache.restore(handle)
    assert_equal(cache.num_free_blocks, 0, "num_free_blocks after restore")


@check("COMPR-08c", "compressed")
def append_beyond_max_tokens_changes_nothing(subject: Subject) -> None:
    fixture = CompressedFixture(subject, max_tokens=10)
    most = fixture.config["max_tokens"]
    fixture.append(fixture.sequence, most - 1)
    with raises("CapacityExceeded"):
        fixture.cache.append(fixture.sequence, *fixture.tokens(2))
    with raises("CapacityExceeded"):
        fixture.cache.step(fixture.sequence, random_tokens(subject, 2, 1, fixture.dim), *fixture.tokens(2))
    fixture.see()
    fixture.append(fixture.sequence, 1)
    fixture.see()


@check("LAW-18", "compressed")
def rows_of_model_sizes_are_right(subject: Subject) -> None:
    """The sizes of DeepSeek V4: rows of 512 numbers, 64 of them rotated, and windows and groups of 128 tokens."""
    fixture = CompressedFixture(subject, head_dim=512, rope_dim=64, window=128, ratio=128, max_tokens=700, rollback=3)
    for count in (127, 1, 130, 126, 257):
        fixture.append(fixture.sequence, count)
    fixture.see()
    query = random_tokens(subject, 3, 4, fixture.dim)
    fixture.cache.step(fixture.sequence, query, *fixture.tokens(3))
    fixture.cache.truncate(fixture.sequence, fixture.cache.length(fixture.sequence) - 3)
    fixture.append(fixture.sequence, 1)
    fixture.see()
