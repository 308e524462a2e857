"""Checks of EDIT for the paged cache (`truncate` and `remove`), and of WIN-09 (`release_before`)."""

from contextlib import suppress
from itertools import cycle, product

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.paged.fixture import (
    NO_BLOCK,
    PagedFixture,
    in_use,
    need_tokens,
    offered,
    room,
    small_session,
    tables_alone,
    to_be_filled,
    with_room,
    write_or_ensure_capacity,
)
from kvref_conformance.oracle.expectations import exact_reads
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.oracle.rotary import expected_rotation, full_frequencies, rotated_keys
from kvref_conformance.testlib.assertions import (
    assert_equal,
    assert_pair,
    assert_same,
    assert_true,
    assert_within,
    default_scale,
    expected_attention,
    may_raise,
    raises,
    random_queries,
)
from kvref_conformance.testlib.fixtures import block_table_of, random_pair
from kvref_conformance.testlib.registry import check

UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # relative error of rounding to a dtype
LEAST = {"float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}


@check("EDIT-01abc", "paged")
def truncate_leaves_the_tokens_before_the_new_end(subject: Subject) -> None:
    size = subject.size("block_size", 3)
    for length in dict.fromkeys((2 * size + 1, 2 * size, 2 * size - 1, size, 1, 0)):
        session = small_session(subject, sequences=1)
        sequence = session.create(2 * size + 2, 2 * size + 1)
        before = [session.cache.read(sequence, layer, list(range(length))) for layer in session.layers]
        session.cache.truncate(sequence, length)
        session.look()
        for layer in session.layers:
            assert_pair(session.cache.gather(sequence, layer), before[layer], f"layer {layer} after truncate({length})")
            with raises("PositionOutOfRange"):
                session.cache.read(sequence, layer, [length])


@check("EDIT-02a", "paged")
def truncate_past_the_shortest_layer_raises(subject: Subject) -> None:
    session = small_session(subject, sequences=1)
    sequence = session.create(session.size + 2, session.size + 1)
    before, shortest = session.blocks(), session.length(sequence, session.layers[-1])
    for length in subject.integers(shortest + 1, shortest + 2, 10**6, -1):
        with raises("PositionOutOfRange"):
            session.cache.truncate(sequence, length)
        session.look()
        assert_equal(session.blocks(), before, f"blocks after a rejected truncate({length})")


@check("EDIT-03", "paged")
def write_after_truncate_reads_as_in_a_new_sequence(subject: Subject) -> None:
    session = small_session(subject, sequences=1)
    size = session.size
    for length in (2 * size + 1, 2 * size, 1, 0):
        sequence = session.create(3 * size)
        session.cache.truncate(sequence, length)
        for layer in session.layers:
            session.write(sequence, layer, length, 1)
            session.write(sequence, layer, length + 1, size)
        session.look()
        session.cache.drop(sequence)


@check("EDIT-04abc", "paged")
def truncate_frees_or_keeps_blocks_past_the_new_end(subject: Subject) -> None:
    session = small_session(subject, sequences=1)
    sequence, layers, size = session.create(4 * session.size), len(session.layers), session.size
    others = [session.create(1)] if subject.size("sequences", 2) > 1 else []
    for length in (3 * size, 3 * size - 1, size + 1, 0):
        before = session.used()
        session.cache.truncate(sequence, length)
        least, used = (-(-length // size) + len(others)) * layers, session.used()
        what = f"allocated blocks after truncate({length})"
        assert_true(least <= used <= before, what, f"at least {least} and at most {before}", used)
        session.count_blocks()
    session.write(sequence, 0, 0, 2 * size)
    session.look()
    session.drop_all()


@check("EDIT-05ab", "paged")
def truncate_of_one_sharer_changes_no_other(subject: Subject) -> None:
    subject.require_size(sequences=3)
    size = subject.size("block_size", 3)
    for number in (0, 1):
        for length in dict.fromkeys((2 * size, size + 1, 1, 0)):
            session = small_session(subject, 18)
            parent = session.create(2 * size + 1)
            family = [parent, session.cache.fork(parent), session.cache.fork(parent)]
            session.cache.truncate(family[number], length)
            session.look()
            session.write(family[number], 0, length, size + 1)
            session.look()
            session.drop_all()


@check("EDIT-05a", "paged")
def truncate_of_one_sharer_leaves_the_blocks_of_the_others_allocated(subject: Subject) -> None:
    """After a truncation, another sharer is dropped and all free blocks are written: the third sharer must read as before."""
    subject.require_size(sequences=4)
    for number, length in product((0, 1), (subject.size("block_size", 3), 1, 0)):
        session = PagedFixture(subject, lambda: to_be_filled(subject, 8))
        parent = session.create(2 * session.size)
        sharers = [parent, session.cache.fork(parent), session.cache.fork(parent)]
        session.cache.truncate(sharers.pop(number), length)
        session.cache.drop(sharers.pop(0))
        filler, count = session.cache.create(), 0
        for _ in range(room(session.cache)):
            with may_raise("OutOfBlocks"):
                session.write_in_each_layer(filler, count, session.size)
                count += session.size
        session.look()


@check("EDIT-06a", "paged")
def truncate_to_any_length_succeeds(subject: Subject) -> None:
    session = small_session(subject, sequences=1)
    sequence = session.create(2 * session.size + 2)
    for length in range(2 * session.size + 2, -1, -max(1, session.size // 4)):
        session.cache.truncate(sequence, length)
        session.look()


@check("EDIT-10ad", "paged")
def remove_closes_the_gap(subject: Subject) -> None:
    size = subject.size("block_size", 3)
    for start, stop in (
        (0, 1), (1, size + 1), (size, 2 * size), (0, 2 * size), (2 * size, 3 * size), (1, 1), (size - 1, 3 * size),
    ):  # fmt: skip
        session = small_session(subject, sequences=1)
        sequence = session.create(3 * size + 1, 3 * size)
        used, before = session.used(), [session.cache.gather(sequence, layer) for layer in session.layers]
        session.cache.remove(sequence, start, stop)
        session.look()
        for layer, (keys, values) in enumerate(before):
            wanted = np.delete(keys, slice(start, stop), axis=0), np.delete(values, slice(start, stop), axis=0)
            assert_pair(session.cache.gather(sequence, layer), wanted, f"layer {layer} after remove({start}, {stop})")
        assert_true(session.used() <= used, "allocated blocks after remove", f"at most {used}", session.used())
        session.write(sequence, 0, session.length(sequence, 0), 2)
        session.look()
        session.count_blocks()
        session.drop_all()


@check("EDIT-10d", "paged")
def remove_past_the_end_raises(subject: Subject) -> None:
    session = small_session(subject, sequences=1)
    sequence = session.create(session.size + 2, session.size + 1)
    before, shortest = session.blocks(), session.length(sequence, session.layers[-1])
    negative = [(-1, 1), (-2, -1)] if subject.integers(-1) else []
    for start, stop in ((0, shortest + 1), (shortest, shortest + 1), (2, 1), *negative):
        with raises("PositionOutOfRange"):
            session.cache.remove(sequence, start, stop)
        session.look()
        assert_equal(session.blocks(), before, f"blocks after a rejected remove({start}, {stop})")
    session.cache.drop(sequence)
    with raises("SequenceNotFound"):
        session.cache.remove(sequence, 0, 0)


@check("EDIT-10acg", "paged")
def remove_from_one_sharer_changes_no_other(subject: Subject) -> None:
    subject.require_size(sequences=3)
    size = subject.size("block_size", 3)
    for number, start, stop in ((0, 0, 1), (1, 1, size + 1), (1, size, 2 * size), (0, size + 1, 2 * size + 1)):
        session = small_session(subject, 24)
        parent = session.create(2 * size + 2)
        family = [parent, session.cache.fork(parent)]
        session.cache.remove(family[number], start, stop)
        grandchild = session.cache.fork(family[number])
        session.look()
        session.write(family[1 - number], 0, 0, 2)
        session.write(grandchild, 0, 0, 1)
        session.look()
        session.drop_all()


@check("EDIT-10g", "paged")
def remove_without_room_for_copies_changes_nothing(subject: Subject) -> None:
    subject.require_size(sequences=2)
    session = PagedFixture(subject, lambda: to_be_filled(subject, 3))
    parent = session.create(room(session.cache) * session.size)
    child = session.cache.fork(parent)
    before = session.blocks()
    with may_raise("OutOfBlocks"):
        session.cache.remove(child, 0, 1)
    session.look()
    if session.length(child, 0) == session.length(parent, 0):
        assert_equal(session.blocks(), before, "blocks after remove raised OutOfBlocks")


@check("EDIT-10bcg", "paged")
def remove_with_frequencies_rotates_the_keys_that_move(subject: Subject) -> None:
    size, dim = subject.size("block_size", 3), subject.size("head_dim", 6)
    need_pairs(dim)
    for dtype in subject.formats("float32", "float16", "bfloat16"):
        for layout, theta, start, stop in (
            ("halves", 10_000.0, 1, 2), ("pairs", 10_000.0, 1, size + 1), ("halves", 500_000.0, size, 2 * size),
            ("pairs", 2.5, 0, 1),
        ):  # fmt: skip
            remove_with_rotation(subject, dtype, layout, full_frequencies(dim, theta), range(start, stop))


@check("EDIT-10b", "paged")
def remove_with_frequencies_of_some_pairs_rotates_no_other_number(subject: Subject) -> None:
    """As in a partial rotary embedding, whose layout is that of the rotated numbers."""
    dim = subject.size("head_dim", 7)
    need_pairs(dim)
    for pairs, layout in product(dict.fromkeys((1, max(1, dim // 2 - 1), dim // 2)), ("halves", "pairs")):
        remove_with_rotation(subject, subject.dtype, layout, full_frequencies(2 * pairs, 30.0), range(1, 2), dim=dim)


@check("EDIT-10b", "paged")
def remove_uses_each_frequency_as_given(subject: Subject) -> None:
    """Frequencies that are no powers of one base, as in Llama 3.1 and YaRN: some are lowered by a factor, one is 0."""
    dim = subject.size("head_dim", 6)
    need_pairs(dim)
    lowered = [frequency / factor for frequency, factor in zip(full_frequencies(dim), cycle((1, 8, 32)), strict=False)]
    for frequencies in (lowered, [0.0] * (dim // 2), [1.5, *lowered[1:]][::-1]):
        remove_with_rotation(subject, subject.dtype, "halves", frequencies, range(1, 4))


@check("EDIT-10c", "paged")
def truncate_directly_after_remove_leaves_rotated_keys(subject: Subject) -> None:
    dtype = subject.formats("float32", "float16", "bfloat16")[0]
    dim = subject.size("head_dim", 6)
    need_pairs(dim)
    remove_with_rotation(subject, dtype, "halves", full_frequencies(dim), range(1), num_truncated=1)


def need_pairs(dim: int) -> None:
    if dim < 2:
        raise NotOffered(f"two numbers per head, where its limits say {dim}")


def remove_with_rotation(
    subject: Subject, dtype: str, layout: str, frequencies: list[float], gap: range, num_truncated: int = 0, dim: int = 6
) -> None:
    """Removes tokens with frequencies from a fork, and forks it: in every layer keys that moved are rotated, others unchanged.

    num_truncated: the number of tokens that are truncated after the removal.
    The bound of a number is that of `kvref.rope`, 3 * 2^-24 times the length of its pair, plus the rounding to the dtype.
    """
    subject.require_size(sequences=3)
    cache = with_room(subject, 18, dtype=dtype, head_dim=dim)
    heads, dim, size = cache.config["num_kv_heads"], cache.config["head_dim"], cache.config["block_size"]
    parent, layers, before = cache.create(), range(cache.config["num_layers"]), []
    for layer in layers:
        cache.write(parent, layer, 0, *random_pair(subject, 2 * size + 2, heads, dim))
        before.append([np.asarray(part, np.float32) for part in cache.gather(parent, layer)])
    child, left = cache.fork(parent), 2 * size + 2 - num_truncated
    cache.remove(child, gap.start, gap.stop, frequencies, layout)
    if num_truncated:
        cache.truncate(child, left - len(gap))
    for sequence in (child, cache.fork(child)):
        for layer, pair in zip(layers, before, strict=True):
            keys, values = (part[:left] for part in pair)
            got_keys, got_values = cache.gather(sequence, layer)
            assert_same(got_values, np.delete(values, gap, axis=0), f"values of layer {layer} after remove")
            assert_same(got_keys[: gap.start], keys[: gap.start], f"keys of layer {layer} before the removed tokens")
            want, length = rotated_keys(keys[gap.stop :], -len(gap), frequencies, layout)
            bound = 3.01 * 2.0**-24 * length
            bound += UNIT[dtype] * (abs(want) + bound) + LEAST[dtype]
            bound[..., 2 * len(frequencies) :] = 0
            moved = f"moved keys of layer {layer} with layout {layout} and {len(frequencies)} frequencies, in {dtype}"
            assert_within(got_keys[gap.start :], want, bound, moved)
    for layer, (keys, _) in zip(layers, before, strict=True):
        assert_same(cache.gather(parent, layer)[0], keys, f"keys of the parent in layer {layer} after remove from its fork")


@check("EDIT-10bc", "paged")
def remove_again_with_frequencies_adds_the_rotations(subject: Subject) -> None:
    """Nothing, a read or a fork is between the calls. A cache that rotates later has to add the rotations."""
    size, frequencies = subject.size("block_size", 3), full_frequencies(subject.size("head_dim", 6))
    removals = [(start, stop, frequencies, "halves") for start, stop in ((size, size + 2), (0, 1), (1, size + 1))]
    for count, between in product((2, 3), ("nothing", "read", "fork")):
        remove_several_times(subject, 3 * size + 2, removals[:count], between)


@check("EDIT-10b", "paged")
def remove_again_with_other_frequencies_uses_them(subject: Subject) -> None:
    """By as many positions as before, with as many frequencies, and with the other layout."""
    first = full_frequencies(subject.size("head_dim", 6))
    second = [1 / 3 + frequency / 8 for frequency in first]
    removals = [(0, 1, frequencies, layout) for layout in ("halves", "pairs") for frequencies in (first, second, first)]
    remove_several_times(subject, 9, removals)


@check("EDIT-10b", "paged")
def remove_of_many_tokens_rotates_by_large_angles(subject: Subject) -> None:
    """Frequencies or angles that are rounded to float32 have errors of more than the bound."""
    pairs, count = subject.size("head_dim", 6) // 2, 2000
    for layout in ("halves", "pairs"):
        removals = [(1, 1 + count, [1 / (3 + pair) for pair in range(pairs)], layout)]
        remove_several_times(subject, count + 4, removals)


Removal = tuple[int, int, list[float], str]  # start, stop, frequencies, layout


def remove_several_times(subject: Subject, count: int, removals: list[Removal], between: str = "nothing") -> None:
    """Removes tokens with frequencies from a sequence of `count` tokens: every layer has the rotated keys.

    between: what is between the removals, "nothing", a "read" or a "fork".
    """
    dtype = subject.formats("float32", "float16", "bfloat16")[0]
    cache = with_room(subject, -(-count // subject.size("block_size", 3)), dtype=dtype, head_dim=6)
    need_pairs(cache.config["head_dim"])
    sequence, layers, contents = cache.create(), range(cache.config["num_layers"]), []
    for layer in layers:
        cache.write(sequence, layer, 0, *random_pair(subject, count, cache.config["num_kv_heads"], cache.config["head_dim"]))
        contents.append([exact_reads(np.asarray(part, np.float32)) for part in cache.gather(sequence, layer)])
    for start, stop, frequencies, layout in removals:
        cache.remove(sequence, start, stop, frequencies, layout)
        for layer in layers:
            (keys, values), gone = contents[layer], range(start, stop)
            later = ExpectedReads(*(part[stop:] for part in keys))
            moved = expected_rotation(later, start - stop, frequencies, layout, dtype)
            keys = ExpectedReads(*(np.concatenate([part[:start], new]) for part, new in zip(keys, moved, strict=True)))
            contents[layer] = [keys, exact_reads(np.delete(values.values, gone, axis=0))]
            if between == "read":
                cache.gather(sequence, layer)
        if between == "fork" and subject.size("sequences", 4) >= 4:
            sequence = cache.fork(sequence)
    for layer, (keys, values) in zip(layers, contents, strict=True):
        got_keys, got_values = cache.gather(sequence, layer)
        places = ", ".join(f"[{start}, {stop}) with layout {layout}" for start, stop, _, layout in removals)
        what = f"layer {layer} after removals of {places}, with {between} between, in {dtype}"
        assert_within(got_keys, keys.values, keys.slack, f"keys of {what}")
        assert_same(got_values, values.values, f"values of {what}")


@check("EDIT-10e", "paged")
def remove_with_invalid_frequencies_raises(subject: Subject) -> None:
    cache = with_room(subject, 12, head_dim=6)
    sequence, layers = cache.create(), range(cache.config["num_layers"])
    keys, values = random_pair(subject, 2, cache.config["num_kv_heads"], cache.config["head_dim"])
    for layer in layers:
        cache.write(sequence, layer, 0, keys, values)
    too_many = [1.0] * (cache.config["head_dim"] // 2 + 1)
    for frequencies in (too_many, [], *(() if subject.by_value else ([float("nan")], [float("inf")]))):
        with raises("ConfigError"):
            cache.remove(sequence, 0, 1, frequencies)
    assert_equal(cache.length(sequence, 0), 2, "length after remove with invalid frequencies")
    assert_same(cache.gather(sequence, 0)[0], np.asarray(keys, np.float32), "keys after remove with invalid frequencies")


# Checks of WIN-09: `release_before` frees blocks before a window and moves no token.


def append(session: PagedFixture, sequence: int, start: int, count: int) -> None:
    """Writes `count` tokens in each layer, or ensures the capacity for them if the cache stores no tokens."""
    for layer in session.layers:
        write_or_ensure_capacity(session.subject, session.cache, sequence, layer, start, *session.random_tokens(count))


def read_around_released_positions(session: PagedFixture) -> None:
    """Reads lengths and the remaining tokens, or the block tables if the cache stores no tokens. The model judges the replies.

    Raises ClauseViolation unless reads at released positions raise.
    """
    if tables_alone(session.subject):
        session.look("block_table")
        return
    for sequence in session.model.sequences:
        first = session.model.first_position(sequence)
        for layer in session.layers:
            length = session.cache.length(sequence, layer)
            session.cache.read(sequence, layer, list(range(first, length)))
            for position in (first - 1, 0) if first else ():
                with raises("PositionOutOfRange"):
                    session.cache.read(sequence, layer, [position])


@check("WIN-09abcd", "paged")
def release_before_frees_whole_blocks_before_the_position(subject: Subject) -> None:
    size = subject.size("block_size", 3)
    for position in dict.fromkeys((0, 1, size - 1, size, size + 1, 2 * size, 4 * size, 4 * size + 1)):
        session = small_session(subject, 6)
        sequence, released = session.cache.create(), position // size
        append(session, sequence, 0, 4 * size + 1)
        before = list[list[int]]()
        with suppress(NotOffered):
            before = session.tables()[sequence]
        session.cache.release_before(sequence, position)
        when = f"after release_before({position}) of {4 * size + 1} tokens in blocks of {size}"
        in_use(subject, session.cache, {sequence: 5 - released}, when)
        for layer, blocks in enumerate(before):
            want = [NO_BLOCK] * released + blocks[released:]
            assert_equal(block_table_of(session.cache, sequence, layer), want, f"block table of layer {layer} {when}")
        read_around_released_positions(session)


@check("WIN-09acd", "paged")
def release_before_in_each_step_moves_a_window(subject: Subject) -> None:
    """Released blocks can be allocated to the other sequence at once."""
    session = small_session(subject)
    sequences, size = [session.cache.create(), session.cache.create()], session.size
    for sequence in sequences:
        append(session, sequence, 0, size + 1)
    for length in range(size + 2, 5 * size + 2):
        for sequence in sequences:
            append(session, sequence, length - 1, 1)
            session.cache.release_before(sequence, length - size)
        read_around_released_positions(session)
    left = 6 - (4 * size + 1) // size  # entries
    in_use(subject, session.cache, dict.fromkeys(sequences, left), "after the steps of two windowed sequences")
    for sequence in sequences:
        session.cache.drop(sequence)
    in_use(subject, session.cache, {}, "after drop of both")
    append(session, session.cache.create(), 0, 2 * size + 1)
    read_around_released_positions(session)


@check("WIN-09ac", "paged")
def release_before_of_released_blocks_frees_no_more(subject: Subject) -> None:
    session = small_session(subject, 6)
    sequence, size = session.cache.create(), session.size
    append(session, sequence, 0, 3 * size + 1)
    for position in (2 * size, 2 * size, size, 0, 2 * size + 1):
        session.cache.release_before(sequence, position)
        left = 4 - max(2, position // size)  # entries
        in_use(subject, session.cache, {sequence: left}, f"after release_before({position}), partly repeated")
        read_around_released_positions(session)
    session.cache.drop(sequence)
    in_use(subject, session.cache, {}, "after drop of a sequence with released blocks")


@check("WIN-09ac", "paged")
def release_before_on_one_sharer_changes_no_other(subject: Subject) -> None:
    need_tokens(subject)
    session = small_session(subject, 8, sequences=3)
    parent, size = session.create(3 * session.size + 1), session.size
    child = session.cache.fork(parent)
    session.cache.release_before(parent, 2 * size)
    read_around_released_positions(session)
    session.cache.fork(parent)
    read_around_released_positions(session)
    session.cache.release_before(child, size)  # a block that no other sequence shares
    read_around_released_positions(session)
    session.drop_all()


@check("WIN-09cd", "paged")
def write_slot_mapping_and_truncate_at_released_positions_raise(subject: Subject) -> None:
    session = small_session(subject, 6, sequences=1)
    sequence, size = session.create(3 * session.size + 1), session.size
    session.cache.release_before(sequence, 2 * size)
    for position in (2 * size - 1, 0):
        with raises("PositionOutOfRange"):
            session.write(sequence, 0, position, 1)
        with suppress(NotOffered), raises("PositionOutOfRange"):
            session.cache.slot_mapping(sequence, 0, position, 1)
        if position:
            with suppress(NotOffered), raises("NotTruncatable"):
                session.cache.truncate(sequence, position)
        read_around_released_positions(session)
    session.write_in_each_layer(sequence, 3 * size + 1, 2 * size)
    read_around_released_positions(session)
    with suppress(NotOffered):
        session.cache.truncate(sequence, 0)
        assert_equal(session.cache.length(sequence, 0), 0, "length after truncate(0)")
        session.write(sequence, 0, 0, 1)
        session.look()


@check("WIN-09e", "paged")
def gather_and_attend_cover_the_tokens_that_are_not_released(subject: Subject) -> None:
    session = small_session(subject, 6, sequences=1)
    size, cache, scale = session.size, session.cache, default_scale(subject)
    sequence, (keys, values) = cache.create(), session.random_tokens(3 * size + 1)
    for layer in session.layers:
        cache.write(sequence, layer, 0, keys, values)
    cache.release_before(sequence, size + 1)
    first = (size + 1) // size * size
    left, query = (keys[first:], values[first:]), random_queries(subject, 1)
    want, bound = expected_attention(subject, query, *left, scale=scale)
    gathered = offered(lambda: assert_pair(cache.gather(sequence, 0), left, "the remaining tokens by gather"))
    attended = offered(
        lambda: assert_within(cache.attend(sequence, 0, query, scale), want, bound, "attention over the remaining tokens")
    )
    if not (gathered or attended):
        raise NotOffered("gather or attend")


@check("WIN-09f", "paged")
def release_before_past_the_end_raises(subject: Subject) -> None:
    need_tokens(subject)
    session = small_session(subject, 6, sequences=1)
    sequence, size = session.create(2 * session.size + 1), session.size
    for position in subject.integers(2 * size + 2, 3 * size + 1, -1):
        with raises("PositionOutOfRange"):
            session.cache.release_before(sequence, position)
        read_around_released_positions(session)
    session.cache.drop(sequence)
    with raises("SequenceNotFound"):
        session.cache.release_before(sequence, 0)
