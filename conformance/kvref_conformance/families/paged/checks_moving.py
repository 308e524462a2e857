"""Checks of MOVE for the paged cache: sequences that are saved and loaded, whole and in parts."""

from contextlib import suppress
from typing import Any

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import AFFINE, STATIC, dim_of, inner_of
from kvref_conformance.outcome import NotOffered
from kvref_conformance.testlib.assertions import assert_equal, assert_pair, raises
from kvref_conformance.testlib.fixtures import at_least, formats_of, new, one_of_each_kind, pair_of_tokens
from kvref_conformance.testlib.registry import check

TOKENS = 7  # more than two blocks of 3
Layers = list[tuple[NDArray, NDArray]]


def roomy(subject: Subject, blocks: int = 8, **sizes: Any) -> ObjectProxy:
    """Returns a cache with room for at least `blocks` blocks of 3 tokens per layer."""
    layers, size = subject.size("num_layers", 2), subject.size("block_size", 3)
    wanted = -(-blocks * 3 // size) * layers + layers
    cache = new(subject, "paged", num_blocks=wanted, **sizes)
    at_least(cache, num_blocks=wanted)
    return cache


def cache_of_bits(subject: Subject, cache: ObjectProxy, *lengths: int) -> tuple[int, Layers]:
    """Returns a sequence with lengths[i] tokens in layer i (the last length for further layers), and what it reads as."""
    sequence, held = cache.create(), Layers()
    for layer in range(cache.config["num_layers"]):
        length = lengths[min(layer, len(lengths) - 1)]
        cache.write(sequence, layer, 0, *pair_of_tokens(subject, length, dim=cache.config["head_dim"]))
        keys, values = cache.gather(sequence, layer)
        held.append((np.array(keys), np.array(values)))
    return sequence, held


def holds(cache: ObjectProxy, sequence: int, held: Layers, when: str) -> None:
    for layer, tokens in enumerate(held):
        assert_equal(cache.length(sequence, layer), len(tokens[0]), f"length of layer {layer} {when}")
        assert_pair(cache.gather(sequence, layer), tokens, f"layer {layer} {when}")


def is_empty(cache: ObjectProxy, sequence: int, when: str) -> None:
    """Raises Broken unless the sequence is empty."""
    for layer in range(cache.config["num_layers"]):
        assert_equal(cache.length(sequence, layer), 0, f"length of layer {layer} {when}")
    with raises("PositionOutOfRange"):
        cache.read(sequence, 0, [0])


@check("MOVE-01ac", "paged")
def every_layer_is_loaded_with_the_tokens_that_it_had(subject: Subject) -> None:
    cache, other = roomy(subject), roomy(subject)
    sequence, held = cache_of_bits(subject, cache, TOKENS, TOKENS - 3)
    loaded = other.create()
    other.load(loaded, cache.save(sequence))
    holds(other, loaded, held, "after load into another cache")
    for layer, (keys, values) in enumerate(held):
        more = pair_of_tokens(subject, 2)
        other.write(loaded, layer, len(keys), *more)
        whole = np.concatenate([keys, more[0]]), np.concatenate([values, more[1]])
        assert_pair(other.gather(loaded, layer), whole, f"layer {layer} after load and 2 more tokens")


@check("MOVE-01e", "paged")
def a_loaded_table_has_the_entries_that_the_tokens_need(subject: Subject) -> None:
    cache, other = roomy(subject), roomy(subject)
    sequence, _ = cache_of_bits(subject, cache, TOKENS, TOKENS - 3)
    loaded, _ = cache_of_bits(subject, other, 1)
    other.ensure_capacity(loaded, TOKENS + 6)  # more entries than the load needs
    other.load(loaded, cache.save(sequence))
    for layer in range(other.config["num_layers"]):
        entries = len(other.block_table(loaded, layer))
        assert_equal(entries, -(-TOKENS // other.config["block_size"]), f"entries of the table of layer {layer} after load")


@check("MOVE-01d", "paged")
def a_load_changes_no_other_sequence(subject: Subject) -> None:
    subject.need(sequences=3)
    cache = roomy(subject, 16)
    sequence, held = cache_of_bits(subject, cache, TOKENS)
    data = cache.save(sequence)
    one, others = cache_of_bits(subject, cache, 5)
    child = cache.fork(one)
    cache.load(child, data)
    holds(cache, child, held, "after load into a fork")
    holds(cache, one, others, "of the parent after load into its fork")
    holds(cache, sequence, held, "of the saved sequence")
    free = cache.num_free_blocks
    cache.drop(child)
    assert_equal(cache.num_free_blocks >= free, True, "whether drop of the loaded sequence freed its blocks")
    holds(cache, one, others, "of the parent after drop of its fork")


@check("MOVE-02c", "paged")
def too_few_blocks_change_nothing(subject: Subject) -> None:
    cache = roomy(subject)
    sequence, _ = cache_of_bits(subject, cache, TOKENS)
    layers, size = cache.config["num_layers"], cache.config["block_size"]
    small = new(subject, "paged", **cache.config | {"num_blocks": layers})
    if small.config["num_blocks"] // layers * size >= TOKENS:
        raise NotOffered(f"a pool too small for {TOKENS} tokens, where its limits leave {small.config['num_blocks']} blocks")
    one = small.create()
    small.write(one, 0, 0, *pair_of_tokens(subject, 1))
    before, free = [np.array(part) for part in small.gather(one, 0)], small.num_free_blocks
    with raises("OutOfBlocks"):
        small.load(one, cache.save(sequence))
    assert_pair(small.gather(one, 0), (before[0], before[1]), "a sequence after load raised OutOfBlocks")
    assert_equal(small.num_free_blocks, free, "num_free_blocks after load raised OutOfBlocks")


@check("MOVE-02b", "paged")
def another_given_scale_is_another_format(subject: Subject) -> None:
    for name in formats_of(subject, "dtype", *STATIC):
        cache = roomy(subject, dtype=name, key_scale=0.5, value_scale=0.1)
        sequence, held = cache_of_bits(subject, cache, TOKENS)
        data = cache.save(sequence)
        others: tuple[dict[str, Any], ...] = (
            {"key_scale": 0.25, "value_scale": 0.1},
            {"key_scale": 0.5, "value_scale": 0.2},
            {"key_scale": 0.5},
        )
        for scales in others:
            other = roomy(subject, dtype=name, **scales)
            with raises("ConfigError"):
                other.load(other.create(), data)
        same_scales = roomy(subject, dtype=name, key_scale=0.5, value_scale=float(np.float32(0.1)))  # as stored
        loaded = same_scales.create()
        same_scales.load(loaded, data)
        holds(same_scales, loaded, held, f"after load into a cache with the same scales, in {name}")
        plain, ones = roomy(subject, dtype=name), roomy(subject, dtype=name, key_scale=1.0, value_scale=1.0)
        sequence, held = cache_of_bits(subject, plain, TOKENS)
        loaded = ones.create()
        ones.load(loaded, plain.save(sequence))
        holds(ones, loaded, held, f"after load from a cache without given scales into one with scales of 1, in {name}")


@check("MOVE-03d", "paged")
def a_sequence_that_is_not_there_is_not_loaded(subject: Subject) -> None:
    cache = roomy(subject)
    sequence, held = cache_of_bits(subject, cache, 3)
    data = cache.save(sequence)
    for name, args in (("save", ()), ("load", (data,))):
        with raises("SequenceNotFound"):
            getattr(cache, name)(sequence + 10**6, *args)
    holds(cache, sequence, held, "after save and load of an unknown sequence")


@check("MOVE-04c", "paged")
def copies_and_shifts_are_in_it(subject: Subject) -> None:
    subject.need(sequences=2)
    cache = roomy(subject, 16)
    sequence, _ = cache_of_bits(subject, cache, TOKENS)
    child = cache.fork(sequence)
    cache.write(child, 0, 1, *pair_of_tokens(subject, 2))  # in a shared block
    copied, want = cache.save(child), snapshot(cache, child)
    cache.remove(child, 1, 3)
    shifted, moved = cache.save(child), snapshot(cache, child)
    cache.write(child, 0, 0, *pair_of_tokens(subject, 3))
    cache.load(child, copied)
    holds(cache, child, want, "after load of a file saved after copy-on-write")
    cache.load(child, shifted)
    holds(cache, child, moved, "after load of a file saved after remove")


def snapshot(cache: ObjectProxy, sequence: int) -> Layers:
    found = Layers()
    for layer in range(cache.config["num_layers"]):
        keys, values = cache.gather(sequence, layer)
        found.append((np.array(keys), np.array(values)))
    return found


def come_together(subject: Subject, cut: str, *spans: list[int], **sizes: Any) -> None:
    """Saves a sequence in these parts, loads them in reverse order, and compares the result."""
    cache, other = roomy(subject, **sizes), roomy(subject, **sizes)
    sequence, held = cache_of_bits(subject, cache, TOKENS, TOKENS - 2)
    loaded = other.create()
    parts = [cache.save(sequence, **{cut: span}) for span in spans]
    cache.write(sequence, 0, 0, *pair_of_tokens(subject, 1, dim=cache.config["head_dim"]))  # not in any of the parts
    for part in reversed(parts):
        is_empty(other, loaded, f"before the last part of its {cut} was loaded")
        other.load(loaded, part)
    holds(other, loaded, held, f"after all parts of its {cut} were loaded, in {cache.config['dtype']}")
    assert_equal(other.num_free_blocks, fresh_free(subject, held, **sizes), "num_free_blocks after all parts were loaded")


def fresh_free(subject: Subject, held: Layers, **sizes: Any) -> int:
    """Returns the number of free blocks of a cache that contains only such a sequence."""
    cache = roomy(subject, **sizes)
    sequence = cache.create()
    for layer, (keys, values) in enumerate(held):
        cache.write(sequence, layer, 0, keys, values)
    return int(cache.num_free_blocks)


@check("MOVE-05ab", "paged")
def ranges_of_tokens_come_together(subject: Subject) -> None:
    come_together(subject, "tokens", [0, 2], [2, 4], [4, TOKENS])


@check("MOVE-05ab", "paged")
def layers_come_together(subject: Subject) -> None:
    subject.need(num_layers=2)
    layers = subject.size("num_layers", 2)
    come_together(subject, "layers", [0, 1], [1, layers])


@check("MOVE-05ab", "paged")
def heads_come_together(subject: Subject) -> None:
    subject.need(num_kv_heads=2)
    come_together(subject, "heads", [0, 1], [1, subject.heads])


@check("MOVE-05ab", "paged")
def parts_have_their_codes_scales_and_zeros(subject: Subject) -> None:
    subject.need(num_kv_heads=2)
    for name in one_of_each_kind(subject, "dtype"):
        sizes = {"dtype": name, "head_dim": dim_of(name)}
        come_together(subject, "tokens", [0, 2], [2, TOKENS], **sizes)
        if inner_of(name) not in AFFINE:  # affine scales are for all heads of a token
            come_together(subject, "heads", [0, 1], [1, subject.heads], **sizes)


@check("MOVE-05c", "paged")
def a_part_that_is_not_right_is_as_if_it_had_not_come(subject: Subject) -> None:
    subject.need(sequences=2)
    cache = roomy(subject, 24)
    sequence, held = cache_of_bits(subject, cache, TOKENS)
    another, _ = cache_of_bits(subject, cache, TOKENS - 1)
    first, second = cache.save(sequence, tokens=[0, 3]), cache.save(sequence, tokens=[3, TOKENS])
    of_another = cache.save(another, tokens=[3, TOKENS - 1])
    uneven, _ = cache_of_bits(subject, cache, *[TOKENS] * (len(held) - 1), TOKENS - 1)
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
    holds(cache, another, held, "after all parts, and rejected wrong ones")


@check("MOVE-05d", "paged")
def parts_wait_while_the_sequence_goes_on(subject: Subject) -> None:
    cache, other = roomy(subject), roomy(subject, 16)
    sequence, held = cache_of_bits(subject, cache, TOKENS)
    first, second = (cache.save(sequence, tokens=span) for span in ([0, 4], [4, TOKENS]))
    loaded, own = cache_of_bits(subject, other, 5)
    other.load(loaded, first)
    more = pair_of_tokens(subject, 2)
    for layer, tokens in enumerate(own):
        other.write(loaded, layer, 5, *more)
        own[layer] = np.concatenate([tokens[0], more[0]]), np.concatenate([tokens[1], more[1]])
    holds(other, loaded, own, "after a write between two parts")
    with suppress(NotOffered):
        other.truncate(loaded, 2)
        holds(other, loaded, [(keys[:2], values[:2]) for keys, values in own], "after truncate between two parts")
    other.load(loaded, second)
    holds(other, loaded, held, "after all parts, with a write and truncate in between")


@check("MOVE-05d", "paged")
def parts_are_nobody_elses(subject: Subject) -> None:
    subject.need(sequences=3)
    cache, other = roomy(subject), roomy(subject, 32)
    sequence, held = cache_of_bits(subject, cache, TOKENS)
    first, second = (cache.save(sequence, tokens=span) for span in ([0, 4], [4, TOKENS]))
    loaded, own = cache_of_bits(subject, other, 5)
    other.load(loaded, first)
    children = [other.create()]
    other.load(children[0], other.save(loaded))
    with suppress(NotOffered):
        children.append(other.fork(loaded))
    other.load(loaded, second)
    holds(other, loaded, held, "after all parts, with save and fork in between")
    for child in children:
        holds(other, child, own, "of a sequence that was saved and loaded, or forked, between two parts")


@check("MOVE-05e", "paged")
def room_of_parts_is_given_back(subject: Subject) -> None:
    cache = roomy(subject)
    sequence, held = cache_of_bits(subject, cache, TOKENS)
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
    holds(cache, begun, held, "after load of a part, and then of the whole")
    assert_equal(cache.num_free_blocks, fresh_free(subject, held), "num_free_blocks after load of a part, and then of the whole")
    cache.drop(begun)
    assert_equal(cache.num_free_blocks, free, "num_free_blocks after drop of a sequence that was loaded in part and whole")
