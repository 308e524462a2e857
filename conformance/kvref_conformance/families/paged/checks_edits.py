"""Checks of EDIT for the paged cache: `truncate` and `remove`."""

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import equal, may_raise, raises, same, true, within
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import pair_of_tokens
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.paged.checks_sharing import known
from kvref_conformance.families.paged.counting import room, to_be_filled, with_room
from kvref_conformance.families.paged.known import Known
from kvref_conformance.outcome import NotOffered

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
        equal(cache.seen(), before, f"blocks after a rejected truncate({length})")


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
    equal(cache.used(), 0, "allocated blocks after drop of all sequences")


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
            equal(cache.used(), 0, "allocated blocks after drop of all sequences")


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
        equal(cache.used(), 0, "allocated blocks after drop")


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
        equal(cache.seen(), before, f"blocks after a rejected remove({start}, {stop})")
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
        equal(cache.used(), 0, "allocated blocks after drop of all sequences")


@check("EDIT-10g", "paged")
def what_moves_without_room_for_copies_stays(subject: Subject) -> None:
    subject.need(sequences=2)
    cache = Known(subject, to_be_filled(subject, 3))
    parent = cache.create(room(cache.cache) * cache.size)
    child = cache.fork(parent)
    before = cache.seen()
    try:
        with may_raise("OutOfBlocks"):
            cache.remove(child, 0, 1)
    finally:
        cache.look("after remove without room for copies")
    if cache.length(child, 0) == cache.length(parent, 0):
        equal(cache.seen(), before, "blocks after remove raised OutOfBlocks")


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
            same(got_values, np.delete(values, gap, axis=0), f"values of layer {layer} after remove")
            same(got_keys[: gap.start], keys[: gap.start], f"keys of layer {layer} before the removed tokens")
            want, length = turned(keys[gap.stop :], -len(gap), theta, layout)
            bound = 3.01 * 2.0**-24 * length
            bound += UNIT[dtype] * (abs(want) + bound) + LEAST[dtype]
            moved = f"moved keys of layer {layer} with layout {layout} and theta {theta}, in {dtype}"
            within(got_keys[gap.start :], want, bound, moved)
    for layer, (keys, _) in zip(layers, before, strict=True):
        same(handle.gather(parent, layer)[0], keys, f"keys of the parent in layer {layer} after remove from its fork")


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
    equal(cache.cache.length(sequence, 0), 2, "length after remove with an invalid theta")
    same(cache.cache.gather(sequence, 0)[0], np.asarray(keys, np.float32), "keys after remove with an invalid theta")
