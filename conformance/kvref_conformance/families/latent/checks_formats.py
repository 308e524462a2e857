"""Checks of MLA-06: rows in formats with scales; latent and rope part are quantized as one row."""

from contextlib import suppress

import numpy as np

from kvref_conformance.checking.expect import equal, raises, read, same, shaped, within
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import formats_of, held, one_of_each_kind, takes
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.latent.checks import Pair, filled, given, holds, joined
from kvref_conformance.families.latent.known import attends, of_cache, sizes_of
from kvref_conformance.families.rows.checks import same_values
from kvref_conformance.oracle import records, rotated
from kvref_conformance.oracle.formats import IN_GROUPS, ROTATED, group_of, inner_of
from kvref_conformance.oracle.latent import records_of, row_as, row_bytes
from kvref_conformance.outcome import NotOffered

LOUD = np.float32(2.0**6)


@check("MLA-06a", "latent")
def rows_read_back_as_their_format_says(subject: Subject) -> None:
    """Latents and rope parts differ in magnitude. One scale covers the whole row, or there is one per group."""
    for name in one_of_each_kind(subject, "dtype"):
        cache, pair = filled(subject, 3, **sizes_of(name))
        for loud in ((LOUD, 1.0), (1.0, LOUD)):
            more = given(subject, cache, 2)
            more = held(subject, more[0] * loud[0]), held(subject, more[1] * loud[1])
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
        loud = held(subject, loud[0] * LOUD), held(subject, loud[1] / LOUD)
        cache.append(*loud)
        holds(subject, cache, joined((pair[0][:2], pair[1][:2]), loud), f"in {name}, after two rows replaced truncated ones")
        cache.clear()
        cache.append(*loud)
        holds(subject, cache, loud, f"in {name}, after clear and append")


def recorded(subject: Subject, cache: Handle, pair: Pair, when: str) -> None:
    """Raises Broken unless `read` returns the values of the records, and at level exact the bytes of the records are right."""
    dtype, widths = cache.config["dtype"], (cache.config["rank"], cache.config["rope_dim"])
    want = records_of(*pair, dtype).values
    equal(cache.num_bytes, len(want) * row_bytes(*widths, dtype), f"num_bytes {when}")
    got = shaped(cache.records(), want.shape, f"records {when}")
    equal(got.dtype.kind, "u", f"NumPy kind of the dtype of records {when}")
    if subject.level == "exact":
        same(got.astype(np.uint8), want, f"records {when}")
    want = records.read(got.astype(np.uint8), sum(widths), dtype)
    if dtype in ROTATED and subject.level == "tolerant":
        stored = records.read(got.astype(np.uint8), sum(widths), inner_of(dtype))
        within(cache.read(), want, 2 * rotated.any_order(stored), f"rows {when}, compared with the rows in the records")
    else:
        same_values(subject, cache.read(), want, f"rows {when}, compared with the rows in the records")


@check("MLA-06b", "latent")
def records_are_codes_scales_and_zeros(subject: Subject) -> None:
    for name in one_of_each_kind(subject, "dtype"):
        cache, pair = filled(subject, 3, **sizes_of(name))
        recorded(subject, cache, pair, f"of {name} rows")


@check("MLA-06c", "latent")
def what_a_format_cannot_hold_leaves_nothing_behind(subject: Subject) -> None:
    for name in one_of_each_kind(subject, "dtype"):
        cache, pair = filled(subject, 2, **sizes_of(name))
        for part, bad in ((0, np.nan), (1, np.inf)):
            wrong = given(subject, cache, 2)
            wrong[part][1, -1] = bad
            with raises("NonFinite"):
                cache.append(*wrong)
            equal(cache.length, 2, f"length after a token with {bad} raised NonFinite in {name}")
            read(subject, cache.read(), row_as(*pair, name), f"{name} rows after a token with {bad} raised NonFinite")


@check("MLA-06d", "latent")
def sizes_that_a_group_lies_across_are_refused(subject: Subject) -> None:
    tried = 0
    for name in formats_of(subject, "dtype", *IN_GROUPS)[::23]:
        with suppress(NotOffered):
            config, half = filled(subject, 1, **sizes_of(name))[0].config, group_of(name) // 2
            for wrong in ({"rope_dim": half}, {"rank": half}, {"rank": config["rank"] + half, "rope_dim": half}):
                if all(takes(subject, size, value) for size, value in wrong.items()):
                    tried += 1
                    with raises("ConfigError"):
                        subject.new("latent", **config | wrong)
    if not tried:
        raise NotOffered("sizes at which a group would span two parts of a row")
