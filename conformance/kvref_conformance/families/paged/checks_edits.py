"""Checks of EDIT for the paged cache: `truncate` and `remove`."""

from functools import partial

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.paged.block_accounting import (
    NO_BLOCK,
    in_use,
    layers_of,
    need_tokens,
    offered,
    room,
    stay,
    tables_alone,
    to_be_filled,
    with_room,
    write_or_ensure_capacity,
)
from kvref_conformance.families.paged.checks_sharing import known
from kvref_conformance.families.paged.fixture import PagedFixture
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.outcome import NotOffered
from kvref_conformance.testlib.assertions import (
    assert_equal,
    assert_pair,
    assert_same,
    assert_within,
    default_scale,
    expected_attention,
    may_raise,
    queries,
    raises,
    true,
)
from kvref_conformance.testlib.fixtures import blocks_of, pair_of_tokens
from kvref_conformance.testlib.production_sizes import affordable
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.tagged_content import WrittenContent, belongs, pair_of_content

UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # relative error of rounding to a dtype
LEAST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}


@check("EDIT-01abc", "paged")
def truncating_leaves_what_comes_before(subject: Subject) -> None:
    size = subject.size("block_size", 3)
    for length in dict.fromkeys((2 * size + 1, 2 * size, 2 * size - 1, size, 1, 0)):
        cache = known(subject, sequences=1)
        sequence = cache.create(2 * size + 2, 2 * size + 1)
        cache.truncate(sequence, length)
        cache.look(f"after truncate({length})")
        for layer in cache.layers:
            with raises("PositionOutOfRange"):
                cache.cache.read(sequence, layer, [length])


@check("EDIT-02a", "paged")
def what_is_not_there_is_not_cut(subject: Subject) -> None:
    cache = known(subject, sequences=1)
    sequence = cache.create(cache.size + 2, cache.size + 1)
    before, shortest = cache.seen(), cache.length(sequence, cache.layers[-1])
    for length in subject.integers(shortest + 1, shortest + 2, 10**6, -1):
        with raises("PositionOutOfRange"):
            cache.cache.truncate(sequence, length)
        cache.look(f"after a rejected truncate({length})")
        assert_equal(cache.seen(), before, f"blocks after a rejected truncate({length})")


@check("EDIT-03", "paged")
def what_comes_after_a_cut_is_as_if_nothing_had_been_there(subject: Subject) -> None:
    cache = known(subject, sequences=1)
    size = cache.size
    for length in (2 * size + 1, 2 * size, 1, 0):
        sequence = cache.create(3 * size)
        cache.truncate(sequence, length)
        for layer in cache.layers:
            cache.write(sequence, layer, length, 1)
            cache.write(sequence, layer, length + 1, size)
        cache.look(f"after truncate({length}) and writes")
        cache.drop(sequence)


@check("EDIT-04abc", "paged")
def blocks_past_a_cut_are_given_back_or_held(subject: Subject) -> None:
    cache = known(subject, sequences=1)
    sequence, layers = cache.create(4 * cache.size), len(cache.layers)
    others = [cache.create(1)] if subject.size("sequences", 2) > 1 else []
    for length in (3 * cache.size, 3 * cache.size - 1, cache.size + 1, 0):
        before = cache.used()
        cache.truncate(sequence, length)
        least, used = (-(-length // cache.size) + len(others)) * layers, cache.used()
        true(
            least <= used <= before, f"allocated blocks after truncate({length})", f"at least {least} and at most {before}", used
        )
        cache.adds_up(f"after truncate({length})")
    cache.write(sequence, 0, 0, 2 * cache.size)
    cache.look("after truncate and writes")
    for each in (sequence, *others):
        cache.drop(each)
    assert_equal(cache.used(), 0, "allocated blocks after drop of all sequences")


@check("EDIT-05ab", "paged")
def cutting_one_sharer_cuts_no_other(subject: Subject) -> None:
    subject.need(sequences=3)
    size = subject.size("block_size", 3)
    for which in (0, 1):
        for length in dict.fromkeys((2 * size, size + 1, 1, 0)):
            cache = known(subject, 18)
            parent = cache.create(2 * size + 1)
            family = [parent, cache.fork(parent), cache.fork(parent)]
            cache.truncate(family[which], length)
            cache.look(f"after truncate({length}) of one of three sharers")
            cache.write(family[which], 0, length, size + 1)
            cache.look(f"after truncate({length}) of one of three sharers, and writes")
            for sequence in family:
                cache.drop(sequence)
            assert_equal(cache.used(), 0, "allocated blocks after drop of all sequences")


@check("EDIT-06a", "paged")
def a_sequence_in_pages_can_be_cut_anywhere(subject: Subject) -> None:
    cache = known(subject, sequences=1)
    sequence = cache.create(2 * cache.size + 2)
    for length in range(2 * cache.size + 2, -1, -max(1, cache.size // 4)):
        cache.truncate(sequence, length)
        cache.look(f"after truncate({length})")


@check("EDIT-10ad", "paged")
def removing_closes_the_gap(subject: Subject) -> None:
    size = subject.size("block_size", 3)
    for start, stop in (
        (0, 1),
        (1, size + 1),
        (size, 2 * size),
        (0, 2 * size),
        (2 * size, 3 * size),
        (1, 1),
        (size - 1, 3 * size),
    ):
        cache = known(subject, sequences=1)
        sequence = cache.create(3 * size + 1, 3 * size)
        used = cache.used()
        cache.remove(sequence, start, stop)
        cache.look(f"after remove({start}, {stop})")
        true(cache.used() <= used, "allocated blocks after remove", f"at most {used}", cache.used())
        cache.write(sequence, 0, cache.length(sequence, 0), 2)
        cache.look(f"after remove({start}, {stop}) and a write")
        cache.adds_up("after remove and a write")
        cache.drop(sequence)
        assert_equal(cache.used(), 0, "allocated blocks after drop")


@check("EDIT-10d", "paged")
def removing_what_is_not_there_is_refused(subject: Subject) -> None:
    cache = known(subject, sequences=1)
    sequence = cache.create(cache.size + 2, cache.size + 1)
    before, shortest = cache.seen(), cache.length(sequence, cache.layers[-1])
    for start, stop in (
        (0, shortest + 1),
        (shortest, shortest + 1),
        (2, 1),
        *((-1, 1), (-2, -1))[: len(subject.integers(-1)) * 2],
    ):
        with raises("PositionOutOfRange"):
            cache.cache.remove(sequence, start, stop)
        cache.look(f"after a rejected remove({start}, {stop})")
        assert_equal(cache.seen(), before, f"blocks after a rejected remove({start}, {stop})")
    cache.drop(sequence)
    with raises("SequenceNotFound"):
        cache.cache.remove(sequence, 0, 0)


@check("EDIT-10acg", "paged")
def removing_from_one_sharer_moves_no_other(subject: Subject) -> None:
    subject.need(sequences=3)
    size = subject.size("block_size", 3)
    for which, start, stop in ((0, 0, 1), (1, 1, size + 1), (1, size, 2 * size), (0, size + 1, 2 * size + 1)):
        cache = known(subject, 24)
        parent = cache.create(2 * size + 2)
        family = [parent, cache.fork(parent)]
        cache.remove(family[which], start, stop)
        again = cache.fork(family[which])
        cache.look(f"after remove({start}, {stop}) from one of two sharers, and a fork of it")
        cache.write(family[1 - which], 0, 0, 2)
        cache.write(again, 0, 0, 1)
        cache.look("after writes to the other sharers")
        for sequence in (*family, again):
            cache.drop(sequence)
        assert_equal(cache.used(), 0, "allocated blocks after drop of all sequences")


@check("EDIT-10g", "paged")
def what_moves_without_room_for_copies_stays(subject: Subject) -> None:
    subject.need(sequences=2)
    cache = PagedFixture(subject, to_be_filled(subject, 3))
    parent = cache.create(room(cache.cache) * cache.size)
    child = cache.fork(parent)
    before = cache.seen()
    try:
        with may_raise("OutOfBlocks"):
            cache.remove(child, 0, 1)
    finally:
        cache.look("after remove without room for copies")
    if cache.length(child, 0) == cache.length(parent, 0):
        assert_equal(cache.seen(), before, "blocks after remove raised OutOfBlocks")


def turned(keys: NDArray, by: int, theta: float, layout: str) -> tuple[NDArray, NDArray]:
    """Returns keys rotated by `by` positions in float64, and for each number the length of its pair."""
    dim = keys.shape[-1]
    first = slice(0, dim // 2) if layout == "halves" else slice(0, dim, 2)
    second = slice(dim // 2, dim) if layout == "halves" else slice(1, dim, 2)
    angles = by * theta ** (-2.0 * np.arange(dim // 2) / dim)
    cos, sin, wide = np.cos(angles), np.sin(angles), keys.astype(np.float64)
    want, length = np.empty(keys.shape), np.empty(keys.shape)
    a, b = wide[..., first], wide[..., second]
    want[..., first], want[..., second] = a * cos - b * sin, b * cos + a * sin
    length[..., first] = length[..., second] = np.hypot(a, b)
    return want, length


@check("EDIT-10bcg", "paged")
def keys_that_move_are_turned_back(subject: Subject) -> None:
    size = subject.size("block_size", 3)
    for dtype in subject.formats("float32", "float16", "bfloat16"):
        for layout, theta, start, stop in (
            ("halves", 10_000.0, 1, 2), ("pairs", 10_000.0, 1, size + 1), ("halves", 500_000.0, size, 2 * size),
            ("pairs", 2.5, 0, 1),
        ):  # fmt: skip
            turning(subject, dtype, layout, theta, range(start, stop))


@check("EDIT-10c", "paged")
def a_truncation_directly_after_remove_leaves_rotated_keys(subject: Subject) -> None:
    turning(subject, subject.formats("float32", "float16", "bfloat16")[0], "halves", 10_000.0, range(1), cut=1)


def turning(subject: Subject, dtype: str, layout: str, theta: float, gap: range, cut: int = 0) -> None:
    """Removes tokens with theta from a fork, and forks it: keys that moved are rotated in every layer, all others are unchanged.

    cut: the number of tokens that are truncated after the removal.
    The bound of a number is that of `kvref.rope`, 3 * 2^-24 times the length of its pair, plus the rounding to the dtype.
    """
    subject.need(sequences=3)
    handle = with_room(subject, 18, dtype=dtype, head_dim=6)
    heads, dim, size = handle.config["num_kv_heads"], handle.config["head_dim"], handle.config["block_size"]
    if dim % 2:
        raise NotOffered(f"an even head_dim, where its limits say {dim}")
    parent, layers, before = handle.create(), range(handle.config["num_layers"]), []
    for layer in layers:
        handle.write(parent, layer, 0, *pair_of_tokens(subject, 2 * size + 2, heads, dim))
        before.append([np.asarray(part, np.float32) for part in handle.gather(parent, layer)])
    child, left = handle.fork(parent), 2 * size + 2 - cut
    handle.remove(child, gap.start, gap.stop, theta, layout)
    if cut:
        handle.truncate(child, left - len(gap))
    for sequence in (child, handle.fork(child)):
        for layer, pair in zip(layers, before, strict=True):
            keys, values = (part[:left] for part in pair)
            got_keys, got_values = handle.gather(sequence, layer)
            assert_same(got_values, np.delete(values, gap, axis=0), f"values of layer {layer} after remove")
            assert_same(got_keys[: gap.start], keys[: gap.start], f"keys of layer {layer} before the removed tokens")
            want, length = turned(keys[gap.stop :], -len(gap), theta, layout)
            bound = 3.01 * 2.0**-24 * length
            bound += UNIT[dtype] * (abs(want) + bound) + LEAST[dtype]
            moved = f"moved keys of layer {layer} with layout {layout} and theta {theta}, in {dtype}"
            assert_within(got_keys[gap.start :], want, bound, moved)
    for layer, (keys, _) in zip(layers, before, strict=True):
        assert_same(handle.gather(parent, layer)[0], keys, f"keys of the parent in layer {layer} after remove from its fork")


@check("EDIT-10e", "paged")
def what_cannot_be_turned_is_refused(subject: Subject) -> None:
    cache = known(subject, sequences=1, head_dim=6)
    sequence = cache.cache.create()
    keys, values = pair_of_tokens(subject, 2, cache.cache.config["num_kv_heads"], cache.cache.config["head_dim"])
    cache.cache.write(sequence, 0, 0, keys, values)
    for layer in cache.layers[1:]:
        cache.cache.write(sequence, layer, 0, keys, values)
    for theta in (0.0, -1.0):
        with raises("ConfigError"):
            cache.cache.remove(sequence, 0, 1, theta)
    assert_equal(cache.cache.length(sequence, 0), 2, "length after remove with an invalid theta")
    assert_same(cache.cache.gather(sequence, 0)[0], np.asarray(keys, np.float32), "keys after remove with an invalid theta")


# Checks of WIN-09: `release_before` frees blocks before a window and moves no token.


class SlidingWindowFixture:
    """A sequence whose first blocks are released, with every token that was written to it, per layer."""

    def __init__(self, subject: Subject, cache: ObjectProxy, entries: int, more: int = 1) -> None:
        """Creates a sequence with `entries` full blocks and `more` further tokens."""
        self.subject, self.cache = subject, cache
        self.size: int = cache.config["block_size"]
        self.layers, self.released = layers_of(cache), 0
        self.sequence: int = cache.create()
        self.lie: list[list[int]] = []  # its tables at the last look
        self.tokens: list[tuple[NDArray, NDArray]] = [pair_of_tokens(subject, 0) for _ in self.layers]
        self.write(entries * self.size + more)

    def __len__(self) -> int:
        return len(self.tokens[0][0])

    def write(self, count: int) -> None:
        """Writes `count` more tokens in each layer."""
        for layer in self.layers:
            keys, values = pair_of_tokens(self.subject, count)
            write_or_ensure_capacity(self.subject, self.cache, self.sequence, layer, len(self.tokens[layer][0]), keys, values)
            held = self.tokens[layer]
            self.tokens[layer] = np.concatenate([held[0], keys]), np.concatenate([held[1], values])

    def release(self, position: int) -> None:
        self.cache.release_before(self.sequence, position)
        self.released = max(self.released, position // self.size)

    @property
    def entries(self) -> int:
        """The number of table entries that still have a block."""
        return -(-len(self) // self.size) - self.released

    def tables(self) -> list[list[int]]:
        """Returns the block table of each layer. Raises NotOffered."""
        return [blocks_of(self.cache, self.sequence, layer) for layer in self.layers]

    def look(self, when: str) -> None:
        """Raises Broken unless the remaining tokens read as before at their positions."""
        if tables_alone(self.subject):
            self.lie = stay(self.subject, self.cache, self.sequence, self.lie, self.released, when)
            return
        left = range(self.released * self.size, len(self))
        for layer in self.layers:
            assert_equal(self.cache.length(self.sequence, layer), len(self), f"length of layer {layer} {when}")
            wanted = self.tokens[layer][0][left.start :], self.tokens[layer][1][left.start :]
            assert_pair(
                self.cache.read(self.sequence, layer, list(left)),
                wanted,
                f"positions from {left.start} on, layer {layer}, {when}",
            )
            if left.start:
                for gone in (left.start - 1, 0):
                    with raises("PositionOutOfRange"):
                        self.cache.read(self.sequence, layer, [gone])


@check("WIN-09abcd", "paged")
def whole_blocks_below_a_position_are_given_back(subject: Subject) -> None:
    subject.need(sequences=2)
    size = subject.size("block_size", 3)
    for position in dict.fromkeys((0, 1, size - 1, size, size + 1, 2 * size, 4 * size, 4 * size + 1)):
        cache = with_room(subject, 6)
        run = SlidingWindowFixture(subject, cache, 4)
        before = list[list[int]]()
        offered(partial(lambda run, found: found.extend(run.tables()), run, before))
        run.release(position)
        when = f"after release_before({position}) of {len(run)} tokens in blocks of {size}"
        in_use(subject, cache, {run.sequence: run.entries}, when)
        for layer, blocks in enumerate(before):
            want = [NO_BLOCK] * run.released + blocks[run.released :]
            assert_equal(run.tables()[layer], want, f"block table of layer {layer} {when}")
        run.look(when)


@check("WIN-09acd", "paged")
def a_window_slides_over_a_sequence(subject: Subject) -> None:
    """Released blocks can be allocated to the other sequence at once."""
    subject.need(sequences=2)
    cache = with_room(subject, 12)
    run, other = SlidingWindowFixture(subject, cache, 1), SlidingWindowFixture(subject, cache, 1)
    window = run.size + 1
    for step in range(4 * run.size):
        for each in (run, other):
            each.write(1)
            each.release(max(0, len(each) - window + 1))
        run.look(f"after {step + 1} steps of a window of {window}")
        other.look(f"after {step + 1} steps of a window of {window}, as the second of two sequences")
    in_use(subject, cache, {each.sequence: each.entries for each in (run, other)}, "after the steps of two windowed sequences")
    for each in (run, other):
        cache.drop(each.sequence)
    in_use(subject, cache, {}, "after drop of both")
    SlidingWindowFixture(subject, cache, 2).look("of a sequence created after two with released blocks were dropped")


@check("WIN-09ac", "paged")
def what_was_given_back_is_given_back_once(subject: Subject) -> None:
    subject.need(sequences=2)
    cache = with_room(subject, 6)
    run = SlidingWindowFixture(subject, cache, 3)
    for position in (2 * run.size, 2 * run.size, run.size, 0, 2 * run.size + 1):
        run.release(position)
        in_use(subject, cache, {run.sequence: run.entries}, f"after release_before({position}), partly repeated")
        run.look(f"after release_before({position}), partly repeated")
    cache.drop(run.sequence)
    in_use(subject, cache, {}, "after drop of a sequence with released blocks")


@check("WIN-09ac", "paged")
def a_sharer_keeps_what_another_gives_back(subject: Subject) -> None:
    need_tokens(subject)
    subject.need(sequences=3)
    cache = with_room(subject, 8)
    run = SlidingWindowFixture(subject, cache, 3)
    child = SlidingWindowFixture(subject, cache, 0, 0)
    cache.drop(child.sequence)
    child.sequence, child.tokens = cache.fork(run.sequence), list(run.tokens)
    run.release(2 * run.size)
    child.look("after release_before on its parent")
    run.look("after release_before of shared blocks")
    late = SlidingWindowFixture(subject, cache, 0, 0)
    cache.drop(late.sequence)
    late.sequence, late.tokens, late.released = cache.fork(run.sequence), list(run.tokens), run.released
    late.look("of a fork of a sequence with released blocks")
    child.release(run.size)
    child.look("after release_before of a block that no other sequence shares")
    for each in (run, late, child):
        cache.drop(each.sequence)
    in_use(subject, cache, {}, "after drop of all sharers")


@check("WIN-09cd", "paged")
def nothing_can_be_done_where_blocks_were_given_back(subject: Subject) -> None:
    cache = with_room(subject, 6)
    run = SlidingWindowFixture(subject, cache, 3)
    run.release(2 * run.size)
    keys, values = pair_of_tokens(subject, 1)
    for position in (2 * run.size - 1, 0):
        with raises("PositionOutOfRange"):
            cache.write(run.sequence, 0, position, keys, values)
        offered(partial(_refused_slots, cache, run.sequence, position))
        if position:
            offered(partial(_refused_cut, cache, run.sequence, position))
        run.look("after rejected calls at released positions")
    run.write(2 * run.size)
    run.look("after release_before and writes")
    offered(partial(_begun_anew, subject, cache, run.sequence))


def _begun_anew(subject: Subject, cache: ObjectProxy, sequence: int) -> None:
    cache.truncate(sequence, 0)
    assert_equal(cache.length(sequence, 0), 0, "length after truncate(0)")
    tokens = pair_of_tokens(subject, 1)
    cache.write(sequence, 0, 0, *tokens)
    assert_pair(cache.gather(sequence, 0), tokens, "a token written after truncate(0)")


def _refused_slots(cache: ObjectProxy, sequence: int, position: int) -> None:
    with raises("PositionOutOfRange"):
        cache.slot_mapping(sequence, 0, position, 1)


def _refused_cut(cache: ObjectProxy, sequence: int, length: int) -> None:
    with raises("NotTruncatable"):
        cache.truncate(sequence, length)


@check("WIN-09e", "paged")
def what_goes_over_all_tokens_goes_over_those_that_are_left(subject: Subject) -> None:
    cache = with_room(subject, 6)
    run = SlidingWindowFixture(subject, cache, 3)
    run.release(run.size + 1)
    left = run.tokens[0][0][run.size :], run.tokens[0][1][run.size :]
    gathered = offered(lambda: assert_pair(cache.gather(run.sequence, 0), left, "the remaining tokens by gather"))
    query = queries(subject, 1)
    want, bound = expected_attention(subject, query, *left, scale=default_scale(subject))
    attended = offered(
        lambda: assert_within(
            cache.attend(run.sequence, 0, query, default_scale(subject)), want, bound, "attention over the remaining tokens"
        )
    )
    if not (gathered or attended):
        cache.gather(run.sequence, 0)  # raises NotOffered


@check("WIN-09f", "paged")
def more_than_there_is_cannot_be_given_back(subject: Subject) -> None:
    need_tokens(subject)
    cache = with_room(subject, 6)
    run = SlidingWindowFixture(subject, cache, 2)
    for position in subject.integers(len(run) + 1, len(run) + run.size, -1):
        with raises("PositionOutOfRange"):
            cache.release_before(run.sequence, position)
        run.look(f"after a rejected release_before({position})")
    cache.drop(run.sequence)
    with raises("SequenceNotFound"):
        cache.release_before(run.sequence, 0)


@check("LAW-18", "paged")
def windows_slide_over_long_sequences(subject: Subject) -> None:
    sliding(subject, 1, 64, 128, (1, 127, 300, 1, 16, 65, 1, 1, 257))


@check("LAW-18", "paged", real=True)
def windows_of_models_slide_over_long_sequences(subject: Subject) -> None:
    sliding(subject, 8, 128, 4096, (1, 4095, 2048, 1, 16, 65, 1, 1, 8193, 1))


def sliding(subject: Subject, heads: int, dim: int, window: int, pieces: tuple[int, ...]) -> None:
    """Checks one sequence in a pool with room for its window and its longest step only."""
    pieces = tuple(affordable(subject, each, len(pieces)) for each in pieces)
    size = subject.size("block_size", 16)
    entries = -(-(window + max(pieces)) // size) + 1
    cache = with_room(subject, entries, num_layers=1, num_kv_heads=heads, head_dim=dim, block_size=size)
    written = WrittenContent(cache.config["num_kv_heads"], cache.config["head_dim"])
    sequence, layers, at = cache.create(), layers_of(cache), 0
    for count in pieces:
        for layer in layers:
            cache.write(sequence, layer, at, *pair_of_content(0, layer, range(at, at + count), written.heads, written.dim))
            written.up_to(0, layer, at + count)
        at += count
        below = max(0, at - window + 1)
        cache.release_before(sequence, below)
        left = range(below // size * size, at)
        for layer in layers:
            belongs(cache.read(sequence, layer, list(left)), 0, layer, left, written)
    assert_equal(cache.length(sequence, 0), at, "length of a sequence with released blocks")
