"""Checks of PAGED-18: a paged cache in formats with scales, through all operations."""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.paged.fixture import PagedFixture, layers_of, read_back, room, to_be_filled, with_room
from kvref_conformance.oracle.formats import (
    AFFINE_FORMATS,
    FORMATS_IN_GROUPS,
    GGML_FORMATS,
    GROUP_FORMATS,
    MX_FORMATS,
    NVFP4_FORMATS,
    PLAIN_FORMATS,
    ROTATED_FORMATS,
    SCALED_FORMATS,
    STATIC_FORMATS,
    SYMMETRIC_FORMATS,
    describe_formats,
    dim_of,
    group_of,
)
from kvref_conformance.oracle.formats.per_group import is_affine
from kvref_conformance.oracle.formats.small_floats import MAX
from kvref_conformance.oracle.rotary import full_frequencies, rotated_keys
from kvref_conformance.oracle.token_storage import expected_tokens, restored_slack
from kvref_conformance.testlib.assertions import assert_equal, assert_same, assert_within, expected_attention, normal_rows, raises
from kvref_conformance.testlib.fixtures import new_object, random_pair, sample_formats, supported_formats, supports
from kvref_conformance.testlib.registry import check

KEY_SCALE, VALUE_SCALE = 0.5, 0.037  # scales of the static formats
LARGEST = float(np.finfo(np.float32).max)
KINDS = (
    SYMMETRIC_FORMATS,
    AFFINE_FORMATS,
    GGML_FORMATS,
    (*MX_FORMATS, *NVFP4_FORMATS),
    GROUP_FORMATS,
    ROTATED_FORMATS,
    STATIC_FORMATS,
)
# One scale per head, per token, given, per rotated block, per group. The groups are small, to keep traces short.
PLACES = (
    SYMMETRIC_FORMATS,
    AFFINE_FORMATS,
    STATIC_FORMATS,
    ROTATED_FORMATS,
    tuple(name for name in FORMATS_IN_GROUPS if group_of(name) <= 32),
)


def formats_of_kinds(subject: Subject, among: tuple[str, ...] = SCALED_FORMATS) -> list[str]:
    """Returns the formats of `among` that it stores with an allowed head_dim. Raises NotOffered if there is none."""
    supported = (name for name in among if supports(subject, "dtype", name))
    dims = {name: [subject.size("head_dim", dim_of(name, groups)) for groups in (1, 2)] for name in supported}
    found = [name for name, each in dims.items() if not any(dim % group_of(name) for dim in each)]
    if not found:
        raise NotOffered(describe_formats(among))
    return found


def of_each_kind(subject: Subject, kinds: tuple[tuple[str, ...], ...] = KINDS, count: int = 1) -> list[str]:
    """Returns `count` random formats of each kind, at least one in all."""
    supported = formats_of_kinds(subject)
    among = [[name for name in supported if name in kind] for kind in kinds]
    drawn = [subject.rng.permutation(len(each))[:count] for each in among]
    return [names[at] for names, indices in zip(among, drawn, strict=True) for at in indices] or supported[:1]


def of_format(name: str, groups: int = 1) -> dict[str, Any]:
    """Returns the sizes of a cache of one layer in a format, with scales if the format is static."""
    scales = {"key_scale": KEY_SCALE, "value_scale": VALUE_SCALE} if name in STATIC_FORMATS else {}
    return {"dtype": name, "head_dim": dim_of(name, groups), "num_layers": 1} | scales


def sessions(subject: Subject) -> Iterator[PagedFixture]:
    """Yields a cache of one layer for each place where formats store their scales."""
    for name in of_each_kind(subject, PLACES):
        yield PagedFixture(subject, partial(with_room, subject, 8, **of_format(name)))


@check("PAGED-18a", "paged")
def read_returns_tokens_as_their_format_defines(subject: Subject) -> None:
    for name in of_each_kind(subject, count=2):
        session = PagedFixture(subject, partial(with_room, subject, 8, **of_format(name, 2)))
        sequences, half = [session.create(1) for _ in range(subject.size("sequences", 2))], session.size // 2 + 1
        wrote = session.random_tokens(half)
        for sequence in sequences:  # the blocks of the sequences alternate
            session.cache.write(sequence, 0, 1, *wrote)
        for sequence in sequences:
            session.write(sequence, 0, 1 + half, session.size)
        session.look()
        positions = [half, 1, half]
        keys, values = (part[[position - 1 for position in positions]] for part in wrote)
        got = session.cache.read(sequences[0], 0, positions)
        read_back(subject, session.cache, got, (keys, values), f"positions {positions} in {name}")


@check("PAGED-18b", "paged")
def write_before_the_end_leaves_the_scales_of_other_tokens(subject: Subject) -> None:
    for session in sessions(subject):
        sequence, size = session.create(2 * session.size + 1), session.size
        for start, count in ((1, 1), (size - 1, 2), (2 * size, size)):
            session.write(sequence, 0, start, count)
            session.look()


@check("PAGED-18a", "paged")
def append_step_quantizes_each_token_by_itself(subject: Subject) -> None:
    subject.require_size(sequences=2)
    for session in sessions(subject):
        sequences = [session.create(session.size), session.create(session.size - 1)]
        for batch in (sequences, sequences[::-1], sequences[:1]):
            session.append_step(batch)
            session.look()


@check("PAGED-18c", "paged")
def write_to_a_shared_block_copies_its_scales(subject: Subject) -> None:
    subject.require_size(sequences=2)
    for session in sessions(subject):
        parent, size = session.create(2 * session.size + 1), session.size
        child = session.cache.fork(parent)
        session.look()
        for sequence, start, count in ((child, 2 * size, 1), (parent, 1, size)):
            session.write(sequence, 0, start, count)
            session.look()
        session.cache.drop(parent)
        session.look()


@check("PAGED-18c", "paged")
def write_at_the_end_of_sharers_copies_scales(subject: Subject) -> None:
    subject.require_size(sequences=2)
    for session in sessions(subject):
        parent = session.create(2 * session.size + 1)
        child = session.cache.fork(parent)
        for sequence in (child, parent):
            session.write(sequence, 0, 2 * session.size + 1, 1)
            session.look()
        session.cache.drop(parent)
        session.look()


@check("PAGED-18d", "paged")
def truncate_leaves_the_scales_of_other_tokens(subject: Subject) -> None:
    for session in sessions(subject):
        sequence = session.create(2 * session.size + 1)
        session.cache.truncate(sequence, session.size + 1)
        session.look()
        session.write(sequence, 0, session.size + 1, session.size)
        session.look()


@check("PAGED-18d", "paged")
def remove_moves_scales_with_their_tokens(subject: Subject) -> None:
    for session in sessions(subject):
        sequence = session.create(3 * session.size)
        for start, stop in ((1, 2), (0, session.size), (max(0, session.size - 2), session.size)):
            session.cache.remove(sequence, start, stop)
            session.look()


@check("PAGED-18e", "paged")
def write_to_reused_blocks_replaces_their_scales(subject: Subject) -> None:
    for name in of_each_kind(subject, PLACES):
        session = PagedFixture(subject, partial(to_be_filled, subject, 2, **of_format(name)))
        for _ in range(3):
            sequence = session.create(room(session.cache) * session.size - 1)
            session.look()
            session.cache.drop(sequence)


def is_rounding_decisive(format: str) -> bool:
    """Whether the largest finite numbers read back finite or not depending on how the scale, or a sum, was rounded."""
    return format in (*SYMMETRIC_FORMATS, *ROTATED_FORMATS) or (format in GROUP_FORMATS and not is_affine(format))


@check("PAGED-18f", "paged")
def write_of_values_that_a_format_cannot_store_raises(subject: Subject) -> None:
    tried = False
    for session in sessions(subject):
        name, size = session.cache.config["dtype"], session.size
        keys, bad = session.random_tokens(size)[0], np.full((size, *session.row), MAX.get(subject.dtype, LARGEST), np.float32)
        bad[:, :, ::2] *= -1
        if np.isfinite(expected_tokens(bad, name).values).all() or (is_rounding_decisive(name) and subject.level == "tolerant"):
            continue  # the format can store it, or could with a tolerated scale or sum
        tried, sequence = True, session.create(size)
        before = session.blocks()
        for start in (0, size):
            with raises("NonFinite"):
                session.cache.write(sequence, 0, start, keys, bad)
            session.look()
            assert_equal(session.blocks(), before, f"blocks after a rejected write of values too large for {name} at {start}")
        with suppress(NotOffered):
            with raises("NonFinite"):  # the token needs a block
                session.cache.append([sequence], session.layers[0], keys[:1], bad[:1])
            session.look()
            assert_equal(session.blocks(), before, f"blocks after a rejected append of a value too large for {name}")
    if not tried:
        raise NotOffered("finite inputs that a format with scales cannot store")


@check("PAGED-18g", "paged")
def new_with_a_head_dim_that_is_no_multiple_of_a_group_raises(subject: Subject) -> None:
    tried = [
        (name, dim)
        for name in sample_formats(subject, formats_of_kinds(subject, FORMATS_IN_GROUPS))
        for dim in (group_of(name) + 1, group_of(name) // 2)
        if supports(subject, "head_dim", dim)
    ]
    if not tried:
        raise NotOffered("a head_dim that is not a multiple of a group")
    for name, dim in tried:
        config = new_object(subject, subject.family, dtype=name, head_dim=group_of(name)).config
        with raises("ConfigError"):
            subject.new(subject.family, **config | {"head_dim": dim})


@check("ATTN-10", "paged")
def attend_in_formats_with_scales_covers_the_values_that_gather_returns(subject: Subject) -> None:
    for session in sessions(subject):
        (heads, dim), format = session.row, session.cache.config["dtype"]
        sequence, scale = session.create(session.size + 1), 2.5 / dim
        query, read = normal_rows(subject, 2, heads * subject.size("group_size", 2), dim), session.cache.gather(sequence, 0)
        want, bound = expected_attention(subject, query, *read, scale=scale, rotated=format in ROTATED_FORMATS)
        assert_within(session.cache.attend(sequence, 0, query, scale), want, bound, f"attention over tokens in {format}")


@check("PAGED-17a", "paged")
def gather_batch_reads_tokens_as_their_format_defines(subject: Subject) -> None:
    for session in sessions(subject):
        sequences = [session.create(count) for count in (1, session.size + 1, 2)[-subject.size("sequences", 3) :]]
        for order in (sequences, sequences[::-1]):
            keys, values, _ = session.cache.gather_batch(order, 0)
            each = [session.cache.gather(sequence, 0) for sequence in order]
            for name, got, part in (("keys", keys, 0), ("values", values, 1)):
                assert_same(got, np.concatenate([pair[part] for pair in each]), f"{name} of a batch")


@check("EDIT-10bg", "paged")
def remove_with_frequencies_quantizes_the_rotated_keys_again(subject: Subject) -> None:
    """Keys that move are rotated in float32, within 4 * 2^-24 times the length of each pair, and quantized again.

    Every second token has one large number. Its partner in the pair is in another group, so that the rotation changes scales.
    """
    subject.require_size(sequences=2)
    for name in of_each_kind(subject, count=2):
        dim = dim_of(name, 2) + dim_of(name, 2) % 2
        cache = with_room(subject, 8, **of_format(name) | {"head_dim": dim, "num_layers": 2})
        if cache.config["head_dim"] % 2:
            raise NotOffered(f"an even head_dim, where its limits say {cache.config['head_dim']}")
        parent, layers, (heads, dim) = cache.create(), layers_of(cache), (cache.config["num_kv_heads"], cache.config["head_dim"])
        for layer in layers:
            keys, values = random_pair(subject, cache.config["block_size"] + 4, heads, dim)
            keys[::2, :, 0] = 4 * np.abs(keys[::2]).max(axis=2)
            cache.write(parent, layer, 0, keys, values)
        before = [[np.asarray(part, np.float32) for part in cache.gather(parent, layer)] for layer in layers]
        child = cache.fork(parent)
        frequencies = full_frequencies(dim)
        cache.remove(child, 1, 3, frequencies)
        for layer, (keys, values) in zip(layers, before, strict=True):
            got_keys, got_values = cache.gather(child, layer)
            what = f"layer {layer} after remove, in {name}"
            assert_same(got_values, np.delete(values, range(1, 3), axis=0), f"values of {what}")
            assert_same(got_keys[:1], keys[:1], f"keys before the removed tokens, of {what}")
            want, length = rotated_keys(keys[3:], -2, frequencies, "halves")
            off = restored_slack(want, 4.01 * 2.0**-24 * length, name, cache.config.get("key_scale"), subject.level)
            assert_within(got_keys[1:], want, off, f"moved keys of {what}")
            assert_same(cache.gather(parent, layer)[0], keys, f"keys of the parent, of {what}")


@check("EDIT-10f", "paged")
def remove_with_frequencies_raises_if_a_format_cannot_store_the_keys(subject: Subject) -> None:
    """Rotation makes a number of a pair 1.38 times as large, which is beyond float32, or beyond the cache's own dtype."""
    subject.require_size(sequences=1)
    for name in formats_of_kinds(subject, (*PLAIN_FORMATS, *SYMMETRIC_FORMATS, *AFFINE_FORMATS)):
        cache = with_room(subject, 4, dtype=name, head_dim=6)
        heads, dim = cache.config["num_kv_heads"], cache.config["head_dim"]
        if dim % 2:
            raise NotOffered(f"an even head_dim, where its limits say {dim}")
        rows = np.ones((3, heads, dim), np.float32)
        rows[2] = 0.9 * (MAX.get(name, LARGEST) if name in PLAIN_FORMATS else LARGEST)
        sequence = cache.create()
        for layer in layers_of(cache):
            cache.write(sequence, layer, 0, rows, rows)
        before = [[np.asarray(part, np.float32) for part in cache.gather(sequence, layer)] for layer in layers_of(cache)]
        with raises("NonFinite"):
            cache.remove(sequence, 0, 1, full_frequencies(dim))
        for layer, pair in zip(layers_of(cache), before, strict=True):
            for what, got, want in zip(("keys", "values"), cache.gather(sequence, layer), pair, strict=True):
                assert_same(got, want, f"{what} of layer {layer} after a rejected remove, in {name}")


# Checks of FMT-STATIC: a paged cache with a given scale for keys and one for values.

LOUD = np.float32(2.0**6)  # larger than a scale computed from earlier tokens could represent


class LouderFixture(PagedFixture):
    """A cache in which the values of each write are larger than before, until they are clipped."""

    factor = np.float32(1)

    def random_tokens(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        keys, values = super().random_tokens(count)
        self.factor = min(self.factor * 4, LOUD)
        return keys * self.factor, values * self.factor


@check("FMT-STATIC-06ab", "paged")
def write_stores_keys_and_values_with_their_own_scales(subject: Subject) -> None:
    for name in supported_formats(subject, "dtype", *STATIC_FORMATS):
        both = {"key_scale": KEY_SCALE, "value_scale": VALUE_SCALE}
        for scales in (both, {"key_scale": KEY_SCALE}, {"value_scale": VALUE_SCALE}, {}):
            session = LouderFixture(subject, partial(with_room, subject, 8, dtype=name, num_layers=1, **scales))
            sequence = session.create(session.size + 1)
            session.write(sequence, 0, session.size, 2)
            session.look()
            wrote = session.random_tokens(1)
            session.cache.write(sequence, 0, 0, *wrote)
            what = f"tokens in {name} with scales {scales or 'not given'}"
            read_back(subject, session.cache, session.cache.read(sequence, 0, [0]), wrote, what)


@check("FMT-STATIC-05ab", "paged")
def new_with_an_invalid_scale_raises(subject: Subject) -> None:
    for name in supported_formats(subject, "dtype", *STATIC_FORMATS):
        config = new_object(subject, subject.family, dtype=name).config
        others = [other for other in ("int8", "float32") if supports(subject, "dtype", other)]
        wrong = [(name, scale) for scale in (0.0, -0.5, *(() if subject.by_value else (float("nan"), float("inf"))))]
        for dtype, scale in (*wrong, *((other, 0.5) for other in others)):
            for which in ("key_scale", "value_scale"):
                with raises("ConfigError"):
                    subject.new(subject.family, **config | {"dtype": dtype, which: scale})
