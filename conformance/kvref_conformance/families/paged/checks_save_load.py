"""Checks of MOVE for the paged cache: sequences that are saved and loaded, whole and in parts."""

from contextlib import suppress
from itertools import permutations, product
from typing import Any

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.paged.fixture import in_use
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import AFFINE_FORMATS, STATIC_FORMATS, dim_of, inner_of
from kvref_conformance.testlib.assertions import assert_equal, assert_pair, raises
from kvref_conformance.testlib.fixtures import new_object, one_format_per_kind, random_pair, require_sizes, supported_formats
from kvref_conformance.testlib.law_adapter import unknown_ids
from kvref_conformance.testlib.registry import check

TOKENS = 7  # more than two blocks of 3
Layers = list[tuple[NDArray, NDArray]]


def cache_with_blocks(subject: Subject, blocks: int = 8, **sizes: Any) -> ObjectProxy:
    """Returns a cache with room for at least `blocks` blocks of 3 tokens per layer."""
    layers, size = subject.size("num_layers", 2), subject.size("block_size", 3)
    wanted = -(-blocks * 3 // size) * layers + layers
    cache = new_object(subject, "paged", num_blocks=wanted, **sizes)
    require_sizes(cache, num_blocks=wanted)
    return cache


def written_sequence(subject: Subject, cache: ObjectProxy, *lengths: int) -> tuple[int, Layers]:
    """Returns a sequence with lengths[i] tokens in layer i (the last length for further layers), and what it reads as."""
    sequence = cache.create()
    for layer in range(cache.config["num_layers"]):
        length = lengths[min(layer, len(lengths) - 1)]
        cache.write(sequence, layer, 0, *random_pair(subject, length, cache.config["num_kv_heads"], cache.config["head_dim"]))
    return sequence, contents(cache, sequence)


def contents(cache: ObjectProxy, sequence: int) -> Layers:
    """Returns what the tokens of each layer read as."""
    pairs = (cache.gather(sequence, layer) for layer in range(cache.config["num_layers"]))
    return [(np.array(keys), np.array(values)) for keys, values in pairs]


def assert_contents(cache: ObjectProxy, sequence: int, tokens: Layers, when: str) -> None:
    for layer, (keys, values) in enumerate(tokens):
        assert_equal(cache.length(sequence, layer), len(keys), f"length of layer {layer} {when}")
        assert_pair(cache.gather(sequence, layer), (keys, values), f"layer {layer} {when}")


def assert_empty(cache: ObjectProxy, sequence: int, when: str) -> None:
    """Raises ClauseViolation unless the sequence is empty."""
    for layer in range(cache.config["num_layers"]):
        assert_equal(cache.length(sequence, layer), 0, f"length of layer {layer} {when}")
    with raises("PositionOutOfRange"):
        cache.read(sequence, 0, [0])


@check("MOVE-01ac", "paged")
def load_restores_every_layer(subject: Subject) -> None:
    cache, other = cache_with_blocks(subject), cache_with_blocks(subject)
    sequence, tokens = written_sequence(subject, cache, TOKENS, TOKENS - 3)
    loaded = other.create()
    other.load(loaded, cache.save(sequence))
    assert_contents(other, loaded, tokens, "after load into another cache")
    for layer, (keys, values) in enumerate(tokens):
        more = random_pair(subject, 2)
        other.write(loaded, layer, len(keys), *more)
        whole = np.concatenate([keys, more[0]]), np.concatenate([values, more[1]])
        assert_pair(other.gather(loaded, layer), whole, f"layer {layer} after load and 2 more tokens")


@check("MOVE-01e", "paged")
def load_leaves_the_entries_that_the_tokens_need(subject: Subject) -> None:
    cache, other = cache_with_blocks(subject), cache_with_blocks(subject)
    sequence, _ = written_sequence(subject, cache, TOKENS, TOKENS - 3)
    loaded, _ = written_sequence(subject, other, 1)
    other.ensure_capacity(loaded, TOKENS + 6)  # more entries than the load needs
    other.load(loaded, cache.save(sequence))
    for layer in range(other.config["num_layers"]):
        entries = len(other.block_table(loaded, layer))
        assert_equal(entries, -(-TOKENS // other.config["block_size"]), f"entries of the table of layer {layer} after load")


@check("LAW-03ab", "paged")
def load_frees_the_blocks_of_the_former_contents(subject: Subject) -> None:
    subject.require_size(sequences=2)
    cache = cache_with_blocks(subject, 24)
    entries = [-(-length // cache.config["block_size"]) for length in (TOKENS, 1)]
    (long, _), (short, _) = (written_sequence(subject, cache, length) for length in (TOKENS, 1))
    saved = [(cache.save(sequence), count) for sequence, count in zip((long, short), entries, strict=True)]
    for (data, count), times in product(saved, range(3)):
        cache.load(short, data)
        in_use(subject, cache, {long: entries[0], short: count}, f"after load {times + 1} into another sequence")
    cache.drop(long)
    cache.drop(short)
    in_use(subject, cache, {}, "after drop of a loaded sequence")


@check("MOVE-01d", "paged")
def load_changes_no_other_sequence(subject: Subject) -> None:
    subject.require_size(sequences=3)
    cache = cache_with_blocks(subject, 16)
    sequence, tokens = written_sequence(subject, cache, TOKENS)
    data = cache.save(sequence)
    one, others = written_sequence(subject, cache, 5)
    child = cache.fork(one)
    cache.load(child, data)
    assert_contents(cache, child, tokens, "after load into a fork")
    assert_contents(cache, one, others, "of the parent after load into its fork")
    assert_contents(cache, sequence, tokens, "of the saved sequence")
    free = cache.num_free_blocks
    cache.drop(child)
    assert_equal(cache.num_free_blocks >= free, True, "whether drop of the loaded sequence freed its blocks")
    assert_contents(cache, one, others, "of the parent after drop of its fork")


@check("MOVE-02c", "paged")
def load_without_room_changes_nothing(subject: Subject) -> None:
    cache = cache_with_blocks(subject)
    sequence, _ = written_sequence(subject, cache, TOKENS)
    layers, size = cache.config["num_layers"], cache.config["block_size"]
    small = new_object(subject, "paged", **cache.config | {"num_blocks": layers})
    if small.config["num_blocks"] // layers * size >= TOKENS:
        raise NotOffered(f"a pool too small for {TOKENS} tokens, where its limits leave {small.config['num_blocks']} blocks")
    one = small.create()
    small.write(one, 0, 0, *random_pair(subject, 1))
    before, free = [np.array(part) for part in small.gather(one, 0)], small.num_free_blocks
    with raises("OutOfBlocks"):
        small.load(one, cache.save(sequence))
    assert_pair(small.gather(one, 0), (before[0], before[1]), "a sequence after load raised OutOfBlocks")
    assert_equal(small.num_free_blocks, free, "num_free_blocks after load raised OutOfBlocks")


@check("MOVE-02b", "paged")
def load_into_a_cache_with_other_scales_raises(subject: Subject) -> None:
    for name in supported_formats(subject, "dtype", *STATIC_FORMATS):
        cache = cache_with_blocks(subject, dtype=name, key_scale=0.5, value_scale=0.1)
        sequence, tokens = written_sequence(subject, cache, TOKENS)
        data = cache.save(sequence)
        others: tuple[dict[str, Any], ...] = (
            {"key_scale": 0.25, "value_scale": 0.1},
            {"key_scale": 0.5, "value_scale": 0.2},
            {"key_scale": 0.5},
        )
        for scales in others:
            other = cache_with_blocks(subject, dtype=name, **scales)
            with raises("ConfigError"):
                other.load(other.create(), data)
        same_scales = cache_with_blocks(subject, dtype=name, key_scale=0.5, value_scale=float(np.float32(0.1)))  # as stored
        loaded = same_scales.create()
        same_scales.load(loaded, data)
        assert_contents(same_scales, loaded, tokens, f"after load into a cache with the same scales, in {name}")
        plain, ones = (
            cache_with_blocks(subject, dtype=name),
            cache_with_blocks(subject, dtype=name, key_scale=1.0, value_scale=1.0),
        )
        sequence, tokens = written_sequence(subject, plain, TOKENS)
        loaded = ones.create()
        ones.load(loaded, plain.save(sequence))
        assert_contents(
            ones, loaded, tokens, f"after load from a cache without given scales into one with scales of 1, in {name}"
        )


@check("MOVE-03d", "paged")
def save_and_load_of_an_unknown_sequence_raise(subject: Subject) -> None:
    cache = cache_with_blocks(subject)
    sequence, tokens = written_sequence(subject, cache, 3)
    data = cache.save(sequence)
    for name, args in (("save", ()), ("load", (data,))):
        for unknown in unknown_ids(subject, sequence):
            with raises("SequenceNotFound"):
                getattr(cache, name)(unknown, *args)
    assert_contents(cache, sequence, tokens, "after save and load of an unknown sequence")


@check("MOVE-04c", "paged")
def save_after_write_and_remove_stores_the_current_tokens(subject: Subject) -> None:
    subject.require_size(sequences=2)
    cache = cache_with_blocks(subject, 16)
    sequence, _ = written_sequence(subject, cache, TOKENS)
    child = cache.fork(sequence)
    cache.write(child, 0, 1, *random_pair(subject, 2))  # in a shared block
    copied, want = cache.save(child), contents(cache, child)
    cache.remove(child, 1, 3)
    shifted, moved = cache.save(child), contents(cache, child)
    cache.write(child, 0, 0, *random_pair(subject, 3))
    cache.load(child, copied)
    assert_contents(cache, child, want, "after load of a file saved after copy-on-write")
    cache.load(child, shifted)
    assert_contents(cache, child, moved, "after load of a file saved after remove")


def load_parts(subject: Subject, axis: str, *spans: list[int], **sizes: Any) -> None:
    """Saves a sequence in these parts, loads them in reverse order, and compares the result."""
    cache, other = cache_with_blocks(subject, **sizes), cache_with_blocks(subject, **sizes)
    sequence, tokens = written_sequence(subject, cache, TOKENS, TOKENS - 2)
    loaded = other.create()
    parts = [cache.save(sequence, **{axis: span}) for span in spans]
    cache.write(sequence, 0, 0, *random_pair(subject, 1, dim=cache.config["head_dim"]))  # not in any of the parts
    for part in reversed(parts):
        assert_empty(other, loaded, f"before the last part of its {axis} was loaded")
        other.load(loaded, part)
    assert_contents(other, loaded, tokens, f"after all parts of its {axis} were loaded, in {cache.config['dtype']}")
    assert_equal(other.num_free_blocks, free_blocks_with(subject, tokens, **sizes), "num_free_blocks after all parts were loaded")


def free_blocks_with(subject: Subject, tokens: Layers, **sizes: Any) -> int:
    """Returns the number of free blocks of a cache that contains only such a sequence."""
    cache = cache_with_blocks(subject, **sizes)
    sequence = cache.create()
    for layer, (keys, values) in enumerate(tokens):
        cache.write(sequence, layer, 0, keys, values)
    return int(cache.num_free_blocks)


@check("MOVE-05ab", "paged")
def load_of_ranges_of_tokens_restores_the_sequence(subject: Subject) -> None:
    load_parts(subject, "tokens", [0, 2], [2, 4], [4, TOKENS])


@check("MOVE-05ab", "paged")
def load_of_ranges_of_layers_restores_the_sequence(subject: Subject) -> None:
    subject.require_size(num_layers=2)
    layers = subject.size("num_layers", 2)
    load_parts(subject, "layers", [0, 1], [1, layers])


@check("MOVE-05ab", "paged")
def load_of_ranges_of_heads_restores_the_sequence(subject: Subject) -> None:
    subject.require_size(num_kv_heads=2)
    load_parts(subject, "heads", [0, 1], [1, subject.heads])


@check("MOVE-05ab", "paged")
def load_of_parts_in_any_order_restores_the_sequence(subject: Subject) -> None:
    """The parts are three ranges of heads, or ranges of tokens that are cut into heads and layers differently."""
    subject.require_size(num_kv_heads=3, num_layers=2)
    cache, other = cache_with_blocks(subject, 16, num_kv_heads=3), cache_with_blocks(subject, 16, num_kv_heads=3)
    heads, layers = cache.config["num_kv_heads"], cache.config["num_layers"]
    sequence, tokens = written_sequence(subject, cache, TOKENS, TOKENS - 2)
    by_heads: list[dict[str, Any]] = [{"heads": [0, 1]}, {"heads": [1, 2]}, {"heads": [2, heads]}]
    mixed: list[dict[str, Any]] = [
        {"tokens": [0, 3], "layers": [0, 1]},
        {"tokens": [0, 3], "layers": [1, layers]},
        {"tokens": [3, TOKENS], "heads": [0, 2]},
        {"tokens": [3, TOKENS], "heads": [2, heads]},
    ]
    free = other.num_free_blocks
    for spans in (by_heads, mixed):
        parts = [cache.save(sequence, **span) for span in spans]
        for order in permutations(range(len(parts))):
            loaded = other.create()
            for number in order:
                assert_equal(other.length(loaded, 0), 0, "length before the last part was loaded")
                other.load(loaded, parts[number])
            assert_contents(other, loaded, tokens, f"after load of the parts {[spans[number] for number in order]}")
            other.drop(loaded)
            assert_equal(other.num_free_blocks, free, "num_free_blocks after drop of a sequence that was loaded in parts")


@check("MOVE-01c", "paged")
def any_operation_after_load_acts_as_on_the_saved_sequence(subject: Subject) -> None:
    subject.require_size(sequences=4)
    edit_saved_and_loaded(subject, {})
    with suppress(NotOffered):
        edit_saved_and_loaded(subject, {"tokens": [4, TOKENS]}, {"tokens": [0, 4]})


def edit_saved_and_loaded(subject: Subject, *spans: dict[str, Any]) -> None:
    """Makes the same calls on a saved sequence and on a loaded one, and on a fork of each. spans: the parts that are loaded."""
    cache = cache_with_blocks(subject, 48)
    saved, _ = written_sequence(subject, cache, TOKENS, TOKENS - 2)
    loaded, parts = cache.create(), [cache.save(saved, **span) for span in spans]
    for part in parts:
        cache.load(loaded, part)
    pairs = [(saved, loaded)]
    with suppress(NotOffered):
        pairs.append((cache.fork(saved), cache.fork(loaded)))
    more = [random_pair(subject, count, cache.config["num_kv_heads"], cache.config["head_dim"]) for count in (2, 4, 3)]
    calls: list[tuple[str, tuple[Any, ...]]] = [("write", (0, 1, *more[0])), ("write", (0, TOKENS - 2, *more[1]))]
    calls += [("truncate", (5,)), ("truncate", (2,)), ("write", (0, 2, *more[2]))]
    for pair in reversed(pairs):
        for name, args in calls:
            with suppress(NotOffered):
                for sequence in pair:
                    getattr(cache, name)(sequence, *args)
            for one, other in pairs:
                assert_contents(cache, other, contents(cache, one), f"of a loaded sequence or its fork, after {name}")


@check("MOVE-05ab", "paged")
def load_of_parts_restores_codes_scales_and_zeros(subject: Subject) -> None:
    subject.require_size(num_kv_heads=2)
    for name in one_format_per_kind(subject, "dtype"):
        sizes = {"dtype": name, "head_dim": dim_of(name)}
        load_parts(subject, "tokens", [0, 2], [2, TOKENS], **sizes)
        if inner_of(name) not in AFFINE_FORMATS:  # affine scales are for all heads of a token
            load_parts(subject, "heads", [0, 1], [1, subject.heads], **sizes)


@check("MOVE-05c", "paged")
def load_of_a_wrong_part_changes_nothing(subject: Subject) -> None:
    subject.require_size(sequences=2)
    cache = cache_with_blocks(subject, 24)
    sequence, tokens = written_sequence(subject, cache, TOKENS)
    another, _ = written_sequence(subject, cache, TOKENS - 1)
    first, second = cache.save(sequence, tokens=[0, 3]), cache.save(sequence, tokens=[3, TOKENS])
    of_another = cache.save(another, tokens=[3, TOKENS - 1])
    uneven, _ = written_sequence(subject, cache, *[TOKENS] * (len(tokens) - 1), TOKENS - 1)
    of_uneven = cache.save(uneven, tokens=[3, TOKENS - 1])
    cache.drop(uneven)
    cache.load(another, first)
    damaged = np.array(second)
    damaged[len(damaged) // 2] ^= 1
    with raises("FileDamaged", "ConfigError"):
        cache.load(another, damaged)
    one_head = cache.save(sequence, tokens=[2, 4], heads=[0, 1])  # one of its tokens is already loaded, the other is not
    for wrong in (first, of_another, of_uneven, one_head):
        with raises("ConfigError"):
            cache.load(another, wrong)
    assert_equal(cache.length(another, 0), TOKENS - 1, "length of the target before all parts are loaded")
    cache.load(another, second)
    assert_contents(cache, another, tokens, "after all parts, and rejected wrong ones")


@check("MOVE-05d", "paged")
def write_and_truncate_between_loads_of_parts_succeed(subject: Subject) -> None:
    cache, other = cache_with_blocks(subject), cache_with_blocks(subject, 16)
    sequence, tokens = written_sequence(subject, cache, TOKENS)
    first, second = (cache.save(sequence, tokens=span) for span in ([0, 4], [4, TOKENS]))
    loaded, own = written_sequence(subject, other, 5)
    other.load(loaded, first)
    more = random_pair(subject, 2)
    for layer, (keys, values) in enumerate(own):
        other.write(loaded, layer, 5, *more)
        own[layer] = np.concatenate([keys, more[0]]), np.concatenate([values, more[1]])
    assert_contents(other, loaded, own, "after a write between two parts")
    with suppress(NotOffered):
        other.truncate(loaded, 2)
        assert_contents(other, loaded, [(keys[:2], values[:2]) for keys, values in own], "after truncate between two parts")
    other.load(loaded, second)
    assert_contents(other, loaded, tokens, "after all parts, with a write and truncate in between")


@check("MOVE-05d", "paged")
def load_of_parts_changes_no_saved_or_forked_sequence(subject: Subject) -> None:
    subject.require_size(sequences=3)
    cache, other = cache_with_blocks(subject), cache_with_blocks(subject, 32)
    sequence, tokens = written_sequence(subject, cache, TOKENS)
    first, second = (cache.save(sequence, tokens=span) for span in ([0, 4], [4, TOKENS]))
    loaded, own = written_sequence(subject, other, 5)
    other.load(loaded, first)
    children = [other.create()]
    other.load(children[0], other.save(loaded))
    with suppress(NotOffered):
        children.append(other.fork(loaded))
    other.load(loaded, second)
    assert_contents(other, loaded, tokens, "after all parts, with save and fork in between")
    for child in children:
        assert_contents(other, child, own, "of a sequence that was saved and loaded, or forked, between two parts")


@check("MOVE-05e", "paged")
def drop_after_load_of_a_part_frees_its_blocks(subject: Subject) -> None:
    cache = cache_with_blocks(subject)
    sequence, tokens = written_sequence(subject, cache, TOKENS)
    part, whole = cache.save(sequence, tokens=[0, 3]), cache.save(sequence)
    cache.drop(sequence)
    free = cache.num_free_blocks
    for _ in range(3):
        begun = cache.create()
        cache.load(begun, part)
        cache.drop(begun)
        assert_equal(cache.num_free_blocks, free, "num_free_blocks after drop of a sequence with a loaded part")
    begun = cache.create()
    cache.load(begun, part)
    cache.load(begun, whole)
    assert_contents(cache, begun, tokens, "after load of a part, and then of the whole")
    assert_equal(
        cache.num_free_blocks, free_blocks_with(subject, tokens), "num_free_blocks after load of a part, and then of the whole"
    )
    cache.drop(begun)
    assert_equal(cache.num_free_blocks, free, "num_free_blocks after drop of a sequence that was loaded in part and whole")
