"""Checks of MLA-06: rows in formats with scales; latent and rope part are quantized as one row."""

from contextlib import suppress

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.latent.checks import Pair, filled, given, holds, joined
from kvref_conformance.families.latent.projections import attends, of_cache, sizes_of
from kvref_conformance.families.rows.checks import same_values
from kvref_conformance.families.rows.input_rows import NEAR, largest
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import (
    IN_GROUPS,
    PACKED,
    PLAIN,
    ROTATED,
    group_of,
    hadamard_rotation,
    inner_of,
    packed_records,
)
from kvref_conformance.oracle.formats.mla import TILE, read_records, records_of, row_as, row_bytes
from kvref_conformance.outcome import NotOffered
from kvref_conformance.testlib.assertions import assert_equal, assert_same, assert_within, may_raise, raises, read, shaped, true
from kvref_conformance.testlib.fixtures import formats_of, one_of_each_kind, random_tokens, round_to_input_dtype, supports
from kvref_conformance.testlib.registry import check

LOUD_VALUE = np.float32(2.0**6)


@check("MLA-06a", "latent")
def rows_read_back_as_their_format_says(subject: Subject) -> None:
    """Latents and rope parts differ in magnitude. One scale covers the whole row, or there is one per group."""
    for name in one_of_each_kind(subject, "dtype"):
        cache, pair = filled(subject, 3, **sizes_of(name))
        for loud in ((LOUD_VALUE, 1.0), (1.0, LOUD_VALUE)):
            more = given(subject, cache, 2)
            more = round_to_input_dtype(subject, more[0] * loud[0]), round_to_input_dtype(subject, more[1] * loud[1])
            cache.append(*more)
            pair = joined(pair, more)
        holds(subject, cache, pair, f"in {name}")
        heads = of_cache(subject, cache)
        attends(subject, cache, heads.query(subject, 2), heads, f"attention over {name} rows")


@check("MLA-06a", "latent")
def codes_and_scales_go_and_come_together(subject: Subject) -> None:
    for name in one_of_each_kind(subject, "dtype"):
        cache, pair = filled(subject, 4, **sizes_of(name))
        cache.truncate(2)
        loud = given(subject, cache, 2)
        loud = round_to_input_dtype(subject, loud[0] * LOUD_VALUE), round_to_input_dtype(subject, loud[1] / LOUD_VALUE)
        cache.append(*loud)
        holds(subject, cache, joined((pair[0][:2], pair[1][:2]), loud), f"in {name}, after two rows replaced truncated ones")
        cache.clear()
        cache.append(*loud)
        holds(subject, cache, loud, f"in {name}, after clear and append")


def assert_records(subject: Subject, cache: ObjectProxy, pair: Pair, when: str) -> None:
    """Raises Broken unless `read` returns the values of the records, and at level exact the bytes of the records are right."""
    dtype, widths = cache.config["dtype"], (cache.config["rank"], cache.config["rope_dim"])
    want = records_of(*pair, dtype).values
    assert_equal(cache.num_bytes, len(want) * row_bytes(*widths, dtype), f"num_bytes {when}")
    got = shaped(cache.records(), want.shape, f"records {when}")
    assert_equal(got.dtype.kind, "u", f"NumPy kind of the dtype of records {when}")
    if subject.level == "exact":
        assert_same(got.astype(np.uint8), want, f"records {when}")
    want = packed_records.read(got.astype(np.uint8), sum(widths), dtype)
    if dtype in ROTATED and subject.level == "tolerant":
        stored = packed_records.read(got.astype(np.uint8), sum(widths), inner_of(dtype))
        assert_within(
            cache.read(), want, 2 * hadamard_rotation.any_order(stored), f"rows {when}, compared with the rows in the records"
        )
    else:
        same_values(subject, cache.read(), want, f"rows {when}, compared with the rows in the records")


@check("MLA-06b", "latent")
def records_are_codes_scales_and_zeros(subject: Subject) -> None:
    for name in one_of_each_kind(subject, "dtype"):
        cache, pair = filled(subject, 3, **sizes_of(name))
        assert_records(subject, cache, pair, f"of {name} rows")


@check("MLA-06c", "latent")
def what_a_format_cannot_hold_leaves_nothing_behind(subject: Subject) -> None:
    for name in one_of_each_kind(subject, "dtype"):
        cache, pair = filled(subject, 2, **sizes_of(name))
        for part, bad in ((0, np.nan), (1, np.inf)):
            wrong = given(subject, cache, 2)
            wrong[part][1, -1] = bad
            with raises("NonFinite"):
                cache.append(*wrong)
            assert_equal(cache.length, 2, f"length after a token with {bad} raised NonFinite in {name}")
            read(subject, cache.read(), row_as(*pair, name), f"{name} rows after a token with {bad} raised NonFinite")


@check("MLA-06d", "latent")
def sizes_that_a_group_lies_across_are_refused(subject: Subject) -> None:
    tried = 0
    for name in formats_of(subject, "dtype", *IN_GROUPS)[::23]:
        with suppress(NotOffered):
            config, half = filled(subject, 1, **sizes_of(name))[0].config, group_of(name) // 2
            for wrong in ({"rope_dim": half}, {"rank": half}, {"rank": config["rank"] + half, "rope_dim": half}):
                if all(supports(subject, size, value) for size, value in wrong.items()):
                    tried += 1
                    with raises("ConfigError"):
                        subject.new("latent", **config | wrong)
    if not tried:
        raise NotOffered("sizes at which a group would span two parts of a row")


# Checks of MLA-04: the records of packed rows.

LOUD_TILE = 2.0**8


def packed(subject: Subject, count: int, tiles: int = 3) -> tuple[ObjectProxy, Pair]:
    """Returns a packed cache with `count` tokens, and the tokens."""
    formats_of(subject, "dtype", PACKED)
    return filled(subject, count, dtype=PACKED, rank=tiles * TILE)


def assert_packed_records(subject: Subject, cache: ObjectProxy, pair: Pair, when: str) -> None:
    """Raises Broken unless the records are those of these tokens. At level tolerant, codes and scales may be off by one step."""
    want = records_of(*pair)
    got = shaped(cache.records(), want.values.shape, f"records {when}")
    assert_equal(got.dtype.kind, "u", f"NumPy kind of the dtype of records {when}")
    if subject.level == "exact":
        assert_same(got.astype(np.uint8), want.values, f"records {when}")
    else:
        wrong = np.abs(got.astype(np.int64) - want.values.astype(np.int64)) > want.slack
        true(not wrong.any(), f"records {when}", f"at most one step from {show_row(want.values)}", show_row(got))
    holds(subject, cache, pair, when)
    same_values(subject, cache.read(), read_records(got, cache.config["rank"]), f"rows {when}, compared with the records")


def show_row(rows: NDArray) -> str:
    return f"[{', '.join(map(str, rows[0, :4].tolist()))}, ...]"


@check("MLA-04abcd", "latent")
def records_are_codes_scales_and_the_rope_part(subject: Subject) -> None:
    for tiles in (1, 2, 4):
        cache, pair = packed(subject, 5, tiles)
        assert_packed_records(subject, cache, pair, f"of {tiles} tiles")
        more = given(subject, cache, 2)
        cache.append(*more)
        assert_packed_records(subject, cache, joined(pair, more), f"of {tiles} tiles, after an append of 2 tokens")


@check("MLA-04bd", "latent")
def every_tile_has_a_scale_of_its_own(subject: Subject) -> None:
    cache, (latent, rope) = packed(subject, 3)
    cache.clear()
    tiles = latent.reshape(3, -1, TILE)
    for token in range(3):  # per token a different tile is loud, and another is silent
        tiles[token, token % tiles.shape[1]] *= np.float32(LOUD_TILE)
        tiles[token, (token + 1) % tiles.shape[1]] *= np.float32(0 if tiles.shape[1] > 2 else 2.0**-6)
    pair = round_to_input_dtype(subject, latent), rope
    cache.append(*pair)
    assert_packed_records(subject, cache, pair, "with one tile of large values and one of small values")


@check("MLA-04bd", "latent")
def a_scale_is_any_number(subject: Subject) -> None:
    """A scale is the largest magnitude / 448, not rounded to a power of two. Rounding it would change values by up to half."""
    cache, (latent, rope) = packed(subject, 4)
    cache.clear()
    tiles = latent.reshape(4, -1, TILE)
    tiles[:] = np.clip(tiles, -1, 1)
    for token, most in enumerate((1.75, 1.0, 1.9375, 448.0)):
        tiles[token, :, token] = most * (-1) ** token
    pair = round_to_input_dtype(subject, latent), rope
    cache.append(*pair)
    assert_packed_records(subject, cache, pair, "with scales that are not powers of two")


@check("MLA-04c", "latent")
def the_rope_part_is_rounded_and_never_scaled(subject: Subject) -> None:
    cache, (latent, rope) = packed(subject, 4)
    cache.clear()
    ties = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, -(1 + 2.0**-8), 1000.0, 2.0**-14, 0.0, -0.0, 3.140625], np.float32)
    for loud in (1.0, float(LOUD_TILE)):
        pair = round_to_input_dtype(subject, latent), round_to_input_dtype(subject, np.resize(ties, rope.shape) * loud)
        cache.append(*pair)
        assert_packed_records(subject, cache, pair, "with rope parts halfway between two bfloat16 numbers")
        cache.clear()


@check("MLA-04bd", "latent")
def a_latent_of_zeros_reads_as_zeros(subject: Subject) -> None:
    cache, (latent, rope) = packed(subject, 2)
    cache.clear()
    pair = np.zeros_like(latent), rope
    cache.append(*pair)
    assert_packed_records(subject, cache, pair, "of latents of zeros")


@check("MLA-04e", "latent")
def what_a_record_cannot_hold_is_refused(subject: Subject) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        cache, pair = packed(subject, 2)
        for at in (0, cache.config["rank"] - 1):
            latent, rope = given(subject, cache, 2)
            latent[1, at] = bad
            with raises("NonFinite"):
                cache.append(latent, rope)
            assert_packed_records(subject, cache, pair, f"after a latent with {bad} raised NonFinite")


@check("MLA-04g", "latent")
def rows_that_are_not_packed_are_their_numbers(subject: Subject) -> None:
    for name in formats_of(subject, "dtype", *PLAIN):
        cache, pair = filled(subject, 3, dtype=name)
        assert_same(cache.records(), records_of(*pair, name).values, f"records of {name} rows")


@check("MLA-04f", "latent")
def a_rank_that_is_no_multiple_of_128_cannot_be_packed(subject: Subject) -> None:
    cache, _ = packed(subject, 1)
    sizes, tried = dict(cache.config), 0
    for rank in (TILE - 1, TILE + 1, TILE // 2):
        if subject.limits.of("latent", "rank").allows(rank):
            with raises("ConfigError"):
                subject.new("latent", **sizes | {"rank": rank})
            tried += 1
    if not tried:
        raise NotOffered(f"a rank that is not a multiple of {TILE}, where its limits do not allow one")


@check("MLA-04a", "latent")
def a_record_is_as_long_as_its_sizes_say(subject: Subject) -> None:
    for rank, rope_dim, length in ((512, 64, 656), (128, 8, 148)):
        cache, _ = filled(subject, 2, dtype=PACKED, rank=rank, rope_dim=rope_dim)
        sizes = cache.config["rank"], cache.config["rope_dim"]
        want = length if sizes == (rank, rope_dim) else row_bytes(*sizes, PACKED)
        assert_equal(
            np.asarray(cache.records()).shape[1],
            want,
            f"number of bytes of a record with rank {sizes[0]} and rope_dim {sizes[1]}",
        )


@check("FMT-LEVEL-05", "latent")
def what_is_packed_never_reads_back_infinite(subject: Subject) -> None:
    cache, _ = packed(subject, 1)
    latent, rope = (
        random_tokens(subject, 1, 1, cache.config["rank"])[:, 0],
        random_tokens(subject, 1, 1, cache.config["rope_dim"])[:, 0],
    )
    latent = round_to_input_dtype(subject, np.full(latent.shape, NEAR[0] * largest(subject)))
    latent[0, 0] = largest(subject)
    with may_raise("NonFinite"):
        cache.append(latent, rope)
        true(np.isfinite(cache.read()).all(), f"rows of the largest {subject.dtype}", "finite values, or NonFinite", cache.read())


@check("MLA-04b", "latent")
def records_read_back_alike_wherever_they_lie(subject: Subject) -> None:
    """A token that is appended with others is packed as if it were appended alone."""
    cache, (latent, rope) = packed(subject, 3)
    together = np.asarray(cache.records())
    for at in range(3):
        cache.clear()
        cache.append(latent[at : at + 1], rope[at : at + 1])
        alone = np.asarray(cache.records())
        assert_same(alone, together[at : at + 1], f"the record of token {at} appended alone, compared with appended among others")
        read(subject, cache.read(), row_as(latent[at : at + 1], rope[at : at + 1], PACKED), f"token {at} appended alone")
