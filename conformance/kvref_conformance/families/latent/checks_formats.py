"""Checks of MLA-06: rows in formats with scales; latent and rope part are quantized as one row."""

from contextlib import suppress

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.latent.checks import (
    LatentFixture,
    Pair,
    assert_contents,
    create_with_tokens,
    random_pair,
    scaled_pair,
)
from kvref_conformance.families.latent.projections import attend_and_compare, projections_of_cache, sizes_of
from kvref_conformance.families.rows.checks import same_values
from kvref_conformance.families.rows.input_rows import NEAR, largest
from kvref_conformance.oracle.formats import (
    FORMATS_IN_GROUPS,
    PACKED_FORMAT,
    PLAIN_FORMATS,
    ROTATED_FORMATS,
    group_of,
    hadamard_rotation,
    inner_of,
    packed_records,
)
from kvref_conformance.oracle.formats.mla import TILE, expected_records, expected_row, read_records, row_bytes
from kvref_conformance.testlib.assertions import (
    assert_equal,
    assert_read,
    assert_same,
    assert_shape,
    assert_true,
    assert_within,
    may_raise,
    raises,
)
from kvref_conformance.testlib.fixtures import (
    new_object,
    one_format_per_kind,
    require_sizes,
    round_to_input_dtype,
    supported_formats,
    supports,
)
from kvref_conformance.testlib.registry import check

LOUD_VALUE = 2.0**6


@check("MLA-06a", "latent")
def read_returns_the_values_of_the_format(subject: Subject) -> None:
    """Latents and rope parts differ in magnitude. One scale covers the whole row, or there is one per group."""
    for name in one_format_per_kind(subject, "dtype"):
        cache, pair = create_with_tokens(subject, 7, **sizes_of(name))
        cache.clear()
        for part, rows in zip(pair, (slice(3, 5), slice(5, 7)), strict=True):
            part[rows] = round_to_input_dtype(subject, part[rows] * np.float32(LOUD_VALUE))
        cache.append(*pair)
        assert_contents(subject, cache, pair, f"in {name}")
        heads = projections_of_cache(subject, cache)
        attend_and_compare(subject, cache, heads.query(subject, 2), heads, f"attention over {name} rows")


@check("MLA-06a", "latent")
def truncate_and_clear_remove_codes_and_scales(subject: Subject) -> None:
    for name in one_format_per_kind(subject, "dtype"):
        fixture = LatentFixture(subject, 4, **sizes_of(name))
        for clear in (False, True):
            if clear:
                fixture.cache.clear()
            else:
                fixture.cache.truncate(2)
            fixture.append(2, LOUD_VALUE, 1 / LOUD_VALUE)
            fixture.look()


def assert_records(subject: Subject, cache: ObjectProxy, pair: Pair, when: str) -> None:
    """Raises ClauseViolation unless `read` returns the values of the records, and at level exact the bytes of the
    records are right.
    """
    dtype, widths = cache.config["dtype"], (cache.config["rank"], cache.config["rope_dim"])
    want = expected_records(*pair, dtype).values
    assert_equal(cache.num_bytes, len(want) * row_bytes(*widths, dtype), f"num_bytes {when}")
    got = assert_shape(cache.records(), want.shape, f"records {when}")
    assert_equal(got.dtype.kind, "u", f"NumPy kind of the dtype of records {when}")
    if subject.level == "exact":
        assert_same(got.astype(np.uint8), want, f"records {when}")
    want = packed_records.read(got.astype(np.uint8), sum(widths), dtype)
    if dtype in ROTATED_FORMATS and subject.level == "tolerant":
        stored = packed_records.read(got.astype(np.uint8), sum(widths), inner_of(dtype))
        assert_within(
            cache.read(),
            want,
            2 * hadamard_rotation.summation_error(stored),
            f"rows {when}, compared with the rows in the records",
        )
    else:
        same_values(subject, cache.read(), want, f"rows {when}, compared with the rows in the records")


@check("MLA-06b", "latent")
def records_contain_codes_scales_and_zeros(subject: Subject) -> None:
    for name in one_format_per_kind(subject, "dtype"):
        cache, pair = create_with_tokens(subject, 3, **sizes_of(name))
        assert_records(subject, cache, pair, f"of {name} rows")


@check("MLA-06c", "latent")
def append_of_a_row_that_is_not_finite_changes_nothing(subject: Subject) -> None:
    for name in one_format_per_kind(subject, "dtype"):
        fixture = LatentFixture(subject, 2, **sizes_of(name))
        for part, bad in ((0, np.nan), (1, np.inf)):
            wrong = random_pair(subject, fixture.cache, 2)
            wrong[part][1, -1] = bad
            with raises("NonFinite"):
                fixture.cache.append(*wrong)
            assert_equal(fixture.cache.length, 2, f"length after a token with {bad} raised NonFinite in {name}")
            fixture.look()


@check("MLA-06d", "latent")
def new_with_a_group_across_both_parts_raises(subject: Subject) -> None:
    tried = 0
    for name in supported_formats(subject, "dtype", *FORMATS_IN_GROUPS)[::23]:
        with suppress(NotOffered):
            config, half = create_with_tokens(subject, 1, **sizes_of(name))[0].config, group_of(name) // 2
            for wrong in ({"rope_dim": half}, {"rank": half}, {"rank": config["rank"] + half, "rope_dim": half}):
                if all(supports(subject, size, value) for size, value in wrong.items()):
                    tried += 1
                    with raises("ConfigError"):
                        subject.new("latent", **config | wrong)
    if not tried:
        raise NotOffered("sizes at which a group would span two parts of a row")


# Checks of MLA-04: the records of packed rows.

LOUD_TILE = 2.0**8


def packed_cache(subject: Subject, tiles: int = 3) -> ObjectProxy:
    """Returns an empty packed cache with room for 4 tokens."""
    supported_formats(subject, "dtype", PACKED_FORMAT)
    cache = new_object(subject, "latent", dtype=PACKED_FORMAT, rank=tiles * TILE)
    require_sizes(cache, max_tokens=4)
    return cache


def assert_packed_records(subject: Subject, cache: ObjectProxy, pair: Pair, when: str) -> None:
    """Raises ClauseViolation unless the records are those of these tokens.

    At level tolerant, codes and scales may be off by one step.
    """
    want = expected_records(*pair)
    got = assert_shape(cache.records(), want.values.shape, f"records {when}")
    assert_equal(got.dtype.kind, "u", f"NumPy kind of the dtype of records {when}")
    if subject.level == "exact":
        assert_same(got.astype(np.uint8), want.values, f"records {when}")
    else:
        assert_within(got, want.values, want.slack, f"records {when}")
    assert_contents(subject, cache, pair, when)
    same_values(subject, cache.read(), read_records(got, cache.config["rank"]), f"rows {when}, compared with the records")


def append_and_compare_records(subject: Subject, cache: ObjectProxy, pair: Pair, when: str) -> None:
    """Appends tokens to an empty cache."""
    pair = scaled_pair(subject, pair, 1.0, 1.0)
    cache.append(*pair)
    assert_packed_records(subject, cache, pair, when)


@check("MLA-04abcd", "latent")
def records_contain_codes_scales_and_the_rope_part(subject: Subject) -> None:
    for tiles in (1, 2, 4):
        cache = packed_cache(subject, tiles)
        pair = random_pair(subject, cache, 4)
        cache.append(pair[0][:3], pair[1][:3])
        cache.append(pair[0][3:], pair[1][3:])
        assert_packed_records(subject, cache, pair, f"of {tiles} tiles, after appends of 3 and 1 tokens")


@check("MLA-04bd", "latent")
def records_have_one_scale_per_tile(subject: Subject) -> None:
    cache = packed_cache(subject)
    latent, rope = random_pair(subject, cache, 3)
    tiles = latent.reshape(3, -1, TILE)
    for token in range(3):  # per token a different tile is loud, and another is silent
        tiles[token, token % tiles.shape[1]] *= np.float32(LOUD_TILE)
        tiles[token, (token + 1) % tiles.shape[1]] *= np.float32(0 if tiles.shape[1] > 2 else 2.0**-6)
    append_and_compare_records(subject, cache, (latent, rope), "with one tile of large values and one of small values")


@check("MLA-04bd", "latent")
def records_have_scales_that_are_no_powers_of_two(subject: Subject) -> None:
    """A scale is the largest magnitude / 448, not rounded to a power of two. Rounding it would change values by up to half."""
    cache = packed_cache(subject)
    latent, rope = random_pair(subject, cache, 4)
    tiles = latent.reshape(4, -1, TILE)
    tiles[:] = np.clip(tiles, -1, 1)
    for token, most in enumerate((1.75, 1.0, 1.9375, 448.0)):
        tiles[token, :, token] = most * (-1) ** token
    append_and_compare_records(subject, cache, (latent, rope), "with scales that are not powers of two")


@check("MLA-04c", "latent")
def records_round_the_rope_part_without_a_scale(subject: Subject) -> None:
    cache = packed_cache(subject)
    latent, rope = random_pair(subject, cache, 4)
    ties = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, -(1 + 2.0**-8), 1000.0, 2.0**-14, 0.0, -0.0, 3.140625], np.float32)
    for loud in (np.float32(1), np.float32(LOUD_TILE)):
        pair = latent, np.resize(ties, rope.shape) * loud
        append_and_compare_records(subject, cache, pair, "with rope parts halfway between two bfloat16 numbers")
        cache.clear()


@check("MLA-04bd", "latent")
def read_of_a_latent_of_zeros_returns_zeros(subject: Subject) -> None:
    cache = packed_cache(subject)
    latent, rope = random_pair(subject, cache, 2)
    append_and_compare_records(subject, cache, (np.zeros_like(latent), rope), "of latents of zeros")


@check("MLA-04e", "latent")
def append_of_a_latent_that_is_not_finite_raises(subject: Subject) -> None:
    fixture = LatentFixture(subject, 2, **packed_cache(subject).config)
    for bad in (np.nan, np.inf, -np.inf):
        for at in (0, fixture.cache.config["rank"] - 1):
            latent, rope = random_pair(subject, fixture.cache, 2)
            latent[1, at] = bad
            with raises("NonFinite"):
                fixture.cache.append(latent, rope)
            fixture.look("length", "read", "records")


@check("MLA-04g", "latent")
def records_of_unpacked_rows_are_their_numbers(subject: Subject) -> None:
    for name in supported_formats(subject, "dtype", *PLAIN_FORMATS):
        cache, pair = create_with_tokens(subject, 3, dtype=name)
        assert_same(cache.records(), expected_records(*pair, name).values, f"records of {name} rows")


@check("MLA-04f", "latent")
def new_with_a_packed_rank_of_partial_tiles_raises(subject: Subject) -> None:
    sizes, tried = packed_cache(subject).config, 0
    for rank in (TILE - 1, TILE + 1, TILE // 2):
        if subject.limits.limit("latent", "rank").allows(rank):
            with raises("ConfigError"):
                subject.new("latent", **sizes | {"rank": rank})
            tried += 1
    if not tried:
        raise NotOffered(f"a rank that is not a multiple of {TILE}, where its limits do not allow one")


@check("MLA-04a", "latent")
def records_have_the_length_of_their_sizes(subject: Subject) -> None:
    for rank, rope_dim, length in ((512, 64, 656), (128, 8, 148)):
        cache, _ = create_with_tokens(subject, 2, dtype=PACKED_FORMAT, rank=rank, rope_dim=rope_dim)
        sizes = cache.config["rank"], cache.config["rope_dim"]
        want = length if sizes == (rank, rope_dim) else row_bytes(*sizes, PACKED_FORMAT)
        assert_equal(np.asarray(cache.records()).shape[1], want, f"number of bytes of a record, with rank and rope_dim {sizes}")


@check("FMT-LEVEL-05", "latent")
def read_of_packed_rows_is_finite(subject: Subject) -> None:
    cache = packed_cache(subject)
    latent, rope = random_pair(subject, cache, 1)
    latent = round_to_input_dtype(subject, np.full(latent.shape, NEAR[0] * largest(subject)))
    latent[0, 0] = largest(subject)
    with may_raise("NonFinite"):
        cache.append(latent, rope)
        assert_true(
            np.isfinite(cache.read()).all(), f"rows of the largest {subject.dtype}", "finite values, or NonFinite", cache.read()
        )


@check("MLA-04b", "latent")
def records_do_not_depend_on_the_other_tokens(subject: Subject) -> None:
    cache = packed_cache(subject)
    latent, rope = random_pair(subject, cache, 3)
    cache.append(latent, rope)
    together = np.asarray(cache.records())
    for at in range(3):
        cache.clear()
        alone = latent[at : at + 1], rope[at : at + 1]
        cache.append(*alone)
        assert_same(np.asarray(cache.records()), together[at : at + 1], f"the record of token {at}, compared with among others")
        assert_read(subject, cache.read(), expected_row(*alone, PACKED_FORMAT), f"token {at} appended alone")
