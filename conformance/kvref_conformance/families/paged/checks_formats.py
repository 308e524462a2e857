"""Checks of PAGED-18: a paged cache in formats with scales, through all operations."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.paged.block_accounting import layers_of, room, to_be_filled, with_room
from kvref_conformance.families.paged.checks_edits import turned
from kvref_conformance.families.paged.fixture import PagedFixture, read_back
from kvref_conformance.oracle.formats import (
    AFFINE,
    GGML,
    GROUPS,
    IN_GROUPS,
    MX,
    NVFP4,
    ROTATED,
    SCALED,
    STATIC,
    SYMMETRIC,
    dim_of,
    either,
    group_of,
)
from kvref_conformance.oracle.formats.per_group import is_affine
from kvref_conformance.oracle.formats.small_floats import MAX
from kvref_conformance.oracle.token_storage import stored_from, tokens_as
from kvref_conformance.outcome import NotOffered
from kvref_conformance.testlib.assertions import assert_equal, assert_same, assert_within, expected_attention, normal, raises
from kvref_conformance.testlib.fixtures import formats_of, new, sample_formats, supports
from kvref_conformance.testlib.registry import check

KEY_SCALE, VALUE_SCALE = 0.5, 0.037  # scales of the static formats
LARGEST = float(np.finfo(np.float32).max)
KINDS = (SYMMETRIC, AFFINE, GGML, (*MX, *NVFP4), GROUPS, ROTATED, STATIC)
# One scale per head, per token, given, per rotated block, per group. The groups are small, to keep traces short.
PLACES = (SYMMETRIC, AFFINE, STATIC, ROTATED, tuple(name for name in IN_GROUPS if group_of(name) <= 32))


def taken(subject: Subject, among: tuple[str, ...] = SCALED) -> list[str]:
    """Returns the formats of `among` that it stores with an allowed head_dim. Raises NotOffered if there is none."""
    there = (name for name in among if supports(subject, "dtype", name))
    dims = {name: [subject.size("head_dim", dim_of(name, groups)) for groups in (1, 2)] for name in there}
    found = [name for name, each in dims.items() if not any(dim % group_of(name) for dim in each)]
    if not found:
        raise NotOffered(either(among))
    return found


def of_each_kind(subject: Subject, kinds: tuple[tuple[str, ...], ...] = KINDS, count: int = 1) -> list[str]:
    """Returns `count` random formats of each kind, at least one in all."""
    there = taken(subject)
    among = [[name for name in there if name in kind] for kind in kinds]
    drawn = [subject.rng.permutation(len(each))[:count] for each in among]
    return [names[at] for names, those in zip(among, drawn, strict=True) for at in those] or there[:1]


def of_format(name: str, groups: int = 1) -> dict[str, Any]:
    """Returns the sizes of a cache of one layer in a format, with scales if the format is static."""
    given = {"key_scale": KEY_SCALE, "value_scale": VALUE_SCALE} if name in STATIC else {}
    return {"dtype": name, "head_dim": dim_of(name, groups), "num_layers": 1} | given


def pages(subject: Subject) -> Iterator[PagedFixture]:
    """Yields a cache of one layer for each place where formats store their scales."""
    for name in of_each_kind(subject, PLACES):
        yield PagedFixture(subject, with_room(subject, 8, **of_format(name)))


@check("PAGED-18a", "paged")
def tokens_in_pages_read_back_as_their_format_says(subject: Subject) -> None:
    for name in of_each_kind(subject, count=2):
        cache = PagedFixture(subject, with_room(subject, 8, **of_format(name, 2)))
        sequences, half = [cache.create(1) for _ in range(subject.size("sequences", 2))], cache.size // 2 + 1
        for sequence in sequences:  # the blocks of the sequences alternate
            cache.write(sequence, 0, 1, half)
        for sequence in sequences:
            cache.write(sequence, 0, 1 + half, cache.size)
        cache.look(f"in {name}")
        positions = [cache.size, 0, 2, 0]
        keys, values = cache.tokens[sequences[0]][0]
        got = cache.cache.read(sequences[0], 0, positions)
        read_back(subject, cache.cache, got, (keys[positions], values[positions]), f"positions {positions} in {name}")


@check("PAGED-18b", "paged")
def tokens_beside_one_that_is_overwritten_keep_their_scales(subject: Subject) -> None:
    for cache in pages(subject):
        sequence, size = cache.create(2 * subject.size("block_size", 3) + 1), cache.size
        for start, count in ((1, 1), (size - 1, 2), (2 * size, size)):
            cache.write(sequence, 0, start, count)
            cache.look(f"after a write of {count} tokens at {start}")


@check("PAGED-18a", "paged")
def a_batch_quantizes_each_token_by_itself(subject: Subject) -> None:
    subject.need(sequences=2)
    for cache in pages(subject):
        sequences = [cache.create(cache.size), cache.create(cache.size - 1)]
        for batch in (sequences, sequences[::-1], sequences[:1]):
            cache.step(batch)
            cache.look("after a step of a batch")


@check("PAGED-18c", "paged")
def scales_are_shared_and_copied_with_their_block(subject: Subject) -> None:
    subject.need(sequences=2)
    for cache in pages(subject):
        size = cache.size
        parent = cache.create(2 * size + 1)
        child = cache.fork(parent)
        cache.look("after a fork")
        cache.write(child, 0, 2 * size, 1)
        cache.look("after a write to the fork")
        cache.write(parent, 0, 1, size)
        cache.look("after a write to its parent")
        cache.drop(parent)
        cache.look("after its parent was dropped")


@check("PAGED-18c", "paged")
def scales_are_copied_where_sharers_go_on(subject: Subject) -> None:
    """Like the check before, but only with writes at the end of the sequences."""
    subject.need(sequences=2)
    for cache in pages(subject):
        parent = cache.create(2 * cache.size + 1)
        child = cache.fork(parent)
        for sequence in (child, parent):
            cache.write(sequence, 0, 2 * cache.size + 1, 1)
            cache.look("after a fork and writes at the end")
        cache.drop(parent)
        cache.look("after writes to both, and drop of the parent")


@check("PAGED-18d", "paged")
def scales_are_cut_with_their_tokens(subject: Subject) -> None:
    for cache in pages(subject):
        sequence = cache.create(2 * cache.size + 1)
        cache.truncate(sequence, cache.size + 1)
        cache.look("after truncate")
        cache.write(sequence, 0, cache.size + 1, cache.size)
        cache.look("after truncate and writes")


@check("PAGED-18d", "paged")
def scales_move_with_their_tokens(subject: Subject) -> None:
    for cache in pages(subject):
        sequence = cache.create(3 * cache.size)
        for start, stop in ((1, 2), (0, cache.size), (cache.size - 2, cache.size)):
            cache.remove(sequence, max(start, 0), stop)
            cache.look(f"after remove({start}, {stop})")


@check("PAGED-18e", "paged")
def blocks_that_others_had_come_without_their_scales(subject: Subject) -> None:
    for name in of_each_kind(subject, PLACES):
        cache = PagedFixture(subject, to_be_filled(subject, 2, **of_format(name)))
        for _ in range(3):
            sequence = cache.create(room(cache.cache) * cache.size - 1)
            cache.look(f"in reused blocks, in {name}")
            cache.drop(sequence)


def is_rounding_decisive(format: str) -> bool:
    """Whether the largest finite numbers read back finite or not depending on how the scale, or a sum, was rounded."""
    return format in (*SYMMETRIC, *ROTATED) or (format in GROUPS and not is_affine(format))


@check("PAGED-18f", "paged")
def what_a_format_cannot_hold_is_refused_before_anything_changes(subject: Subject) -> None:
    tried = False
    for cache in pages(subject):
        name, size = cache.cache.config["dtype"], cache.size
        good, bad = cache.given(size), np.full((size, *cache.row), MAX.get(subject.dtype, LARGEST), np.float32)
        bad[:, :, ::2] *= -1
        if np.isfinite(tokens_as(bad, name).values).all() or (is_rounding_decisive(name) and subject.level == "tolerant"):
            continue  # the format can store it, or could with a tolerated scale or sum
        tried, sequence = True, cache.create(size)
        before = cache.seen()
        for start in (0, size):
            with raises("NonFinite"):
                cache.cache.write(sequence, 0, start, good[0], bad)
            cache.look(f"after a rejected write of values too large for {name} at {start}")
            assert_equal(cache.seen(), before, f"blocks after a rejected write of values too large for {name} at {start}")
    if not tried:
        raise NotOffered("finite inputs that a format with scales cannot store")


@check("PAGED-18g", "paged")
def pages_that_no_group_goes_into_are_refused(subject: Subject) -> None:
    tried = [
        (name, dim)
        for name in sample_formats(subject, taken(subject, IN_GROUPS))
        for dim in (group_of(name) + 1, group_of(name) // 2)
        if supports(subject, "head_dim", dim)
    ]
    if not tried:
        raise NotOffered("a head_dim that is not a multiple of a group")
    for name, dim in tried:
        config = new(subject, subject.family, dtype=name, head_dim=group_of(name)).config
        with raises("ConfigError"):
            subject.new(subject.family, **config | {"head_dim": dim})


@check("ATTN-10", "paged")
def attention_over_pages_with_scales_is_over_what_they_read_as(subject: Subject) -> None:
    for cache in pages(subject):
        sequence, heads = cache.create(cache.size + 1), cache.row[0] * subject.size("group_size", 2)
        query, scale = normal(subject, 2, heads, cache.row[1]), 2.5 / cache.row[1]
        want, bound = expected_attention(
            subject, query, *cache.cache.gather(sequence, 0), scale=scale, rotated=cache.cache.config["dtype"] in ROTATED
        )
        got = cache.cache.attend(sequence, 0, query, scale)
        assert_within(got, want, bound, f"attention over tokens in {cache.cache.config['dtype']}")


@check("PAGED-17a", "paged")
def a_batch_of_pages_with_scales_is_gathered_as_each_of_them_reads(subject: Subject) -> None:
    for cache in pages(subject):
        sequences = [cache.create(count) for count in (1, cache.size + 1, 2)[-subject.size("sequences", 3) :]]
        for order in (sequences, sequences[::-1]):
            keys, values, _ = cache.cache.gather_batch(order, 0)
            wrote = [np.concatenate(part) for part in zip(*(cache.tokens[sequence][0] for sequence in order), strict=True)]
            what = f"a batch of {len(order)} sequences in {cache.cache.config['dtype']}"
            read_back(subject, cache.cache, (keys, values), (wrote[0], wrote[1]), what)


@check("EDIT-10bg", "paged")
def keys_that_move_are_turned_and_quantized_again(subject: Subject) -> None:
    """Keys that move are rotated in float32, within 4 * 2^-24 times the length of each pair, and quantized again.

    Every second token has one large number. Its partner in the pair is in another group, so that the rotation changes scales.
    """
    subject.need(sequences=2)
    for name in of_each_kind(subject, count=2):
        dim = dim_of(name, 2) + dim_of(name, 2) % 2
        cache = with_room(subject, 8, **of_format(name) | {"head_dim": dim, "num_layers": 2})
        if cache.config["head_dim"] % 2:
            raise NotOffered(f"an even head_dim, where its limits say {cache.config['head_dim']}")
        known, parent, layers = PagedFixture(subject, cache), cache.create(), layers_of(cache)
        for layer in layers:
            keys, values = known.given(known.size + 4)
            keys[::2, :, 0] = 4 * np.abs(keys[::2]).max(axis=2)
            cache.write(parent, layer, 0, keys, values)
        before = [[np.asarray(part, np.float32) for part in cache.gather(parent, layer)] for layer in layers]
        child = cache.fork(parent)
        cache.remove(child, 1, 3, 10_000.0)
        for layer, (keys, values) in zip(layers, before, strict=True):
            got_keys, got_values = cache.gather(child, layer)
            what = f"layer {layer} after remove, in {name}"
            assert_same(got_values, np.delete(values, range(1, 3), axis=0), f"values of {what}")
            assert_same(got_keys[:1], keys[:1], f"keys before the removed tokens, of {what}")
            want, length = turned(keys[3:], -2, 10_000.0, "halves")
            off = stored_from(want, 4.01 * 2.0**-24 * length, name, cache.config.get("key_scale"), subject.level)
            assert_within(got_keys[1:], want, off, f"moved keys of {what}")
            assert_same(cache.gather(parent, layer)[0], keys, f"keys of the parent, of {what}")


@check("EDIT-10f", "paged")
def turned_keys_that_a_format_cannot_hold_are_refused(subject: Subject) -> None:
    """Rotation makes a number of a pair 1.38 times as large, which is beyond float32."""
    subject.need(sequences=1)
    for name in taken(subject, (*SYMMETRIC, *AFFINE)):
        cache = with_room(subject, 4, dtype=name, head_dim=6)
        heads, dim = cache.config["num_kv_heads"], cache.config["head_dim"]
        if dim % 2:
            raise NotOffered(f"an even head_dim, where its limits say {dim}")
        rows = np.ones((3, heads, dim), np.float32)
        rows[2] = 0.9 * LARGEST
        sequence = cache.create()
        for layer in layers_of(cache):
            cache.write(sequence, layer, 0, rows, rows)
        before = [[np.asarray(part, np.float32) for part in cache.gather(sequence, layer)] for layer in layers_of(cache)]
        with raises("NonFinite"):
            cache.remove(sequence, 0, 1, 10_000.0)
        for layer, pair in zip(layers_of(cache), before, strict=True):
            for what, got, want in zip(("keys", "values"), cache.gather(sequence, layer), pair, strict=True):
                assert_same(got, want, f"{what} of layer {layer} after a rejected remove, in {name}")


# Checks of FMT-STATIC: a paged cache with a given scale for keys and one for values.

LOUD = np.float32(2.0**6)  # larger than a scale computed from earlier tokens could represent


class LouderFixture(PagedFixture):
    """A cache in which the values of each write are larger than before, until they are clipped."""

    loud = np.float32(1)

    def given(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        keys, values = super().given(count)
        self.loud = min(self.loud * 4, LOUD) if count else self.loud
        return keys * self.loud, values * self.loud


@check("FMT-STATIC-06ab", "paged")
def pages_hold_keys_and_values_by_the_scale_that_is_theirs(subject: Subject) -> None:
    for name in formats_of(subject, "dtype", *STATIC):
        for given in (
            {"key_scale": KEY_SCALE, "value_scale": VALUE_SCALE},
            {"key_scale": KEY_SCALE},
            {"value_scale": VALUE_SCALE},
            {},
        ):
            cache = LouderFixture(subject, with_room(subject, 8, dtype=name, num_layers=1, **given))
            sequence = cache.create(cache.size + 1)
            cache.write(sequence, 0, cache.size, 2)
            cache.look(f"in {name} with scales {given or 'not given'}")


@check("FMT-STATIC-05ab", "paged")
def pages_of_a_scale_that_is_none_are_refused(subject: Subject) -> None:
    for name in formats_of(subject, "dtype", *STATIC):
        config = new(subject, subject.family, dtype=name).config
        others = [other for other in ("int8", "float32") if supports(subject, "dtype", other)]
        wrong = [(name, scale) for scale in (0.0, -0.5, *(() if subject.by_value else (float("nan"), float("inf"))))]
        for dtype, scale in (*wrong, *((other, 0.5) for other in others)):
            for which in ("key_scale", "value_scale"):
                with raises("ConfigError"):
                    subject.new(subject.family, **config | {"dtype": dtype, which: scale})
