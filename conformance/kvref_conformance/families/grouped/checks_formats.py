"""Checks of GROUP-08: the grouped cache in formats with scales."""

from collections.abc import Iterator

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.attending import exact
from kvref_conformance.checking.expect import equal, raises, within
from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.grouped.checks import reach
from kvref_conformance.families.grouped.grown import Grown, One
from kvref_conformance.families.paged.checks_formats import LARGEST, PLACES, is_rounding_decisive, of_each_kind
from kvref_conformance.families.prefix.served import prompt
from kvref_conformance.oracle.elements import MAX
from kvref_conformance.oracle.formats import ROTATED, dim_of
from kvref_conformance.oracle.tokens import tokens_as


def in_formats(subject: Subject, tokens: int, sequences: int = 1, **sizes: int) -> Iterator[tuple[str, Grown]]:
    """Yields one supported format of each kind (one scale per head, one per token, one per group), and a cache in it."""
    for name in of_each_kind(subject, PLACES):
        yield name, Grown(subject, tokens, sequences, dtype=name, head_dim=dim_of(name, 1), **sizes)


@check("GROUP-08a", "grouped")
def what_groups_hold_reads_back_as_its_format_says(subject: Subject) -> None:
    length = reach(subject)
    for name, grown in in_formats(subject, length):
        for which in (1, 2):  # the second reuses the blocks of the first
            sequence = grown.begin(prompt(length, which))
            grown.up_to(sequence, length, by=grown.size + 1)
            grown.look(sequence, f"a sequence of {length} tokens in {name}")
            grown.drop(sequence)


@check("GROUP-08a", "grouped")
def scales_are_found_and_copied_with_their_blocks(subject: Subject) -> None:
    subject.need(sequences=2)
    for name, grown in in_formats(subject, 3 * subject.size("block_size", 3), 2, num_layers=2):
        tokens = [*prompt(grown.size + 1), *prompt(grown.size, 2)]
        first = grown.begin(tokens)
        grown.up_to(first, grown.size + 1, commit=True)
        second = grown.begin(tokens)
        grown.look(second, f"the hit of a sequence in {name}")
        grown.drop(second)
        child, like = grown.cache.fork(first), grown.sequences[first]
        grown.sequences[child] = One([*tokens[: grown.size + 1], *prompt(grown.size, 3)], like.salt, like.length, list(like.gone))
        grown.step(child, 1)
        grown.step(first, 1)
        for sequence in (child, first):
            grown.look(sequence, f"a sequence after fork and a step of each sharer, in {name}")


@check("GROUP-08b", "grouped")
def attention_over_groups_with_scales_is_over_what_they_read_as(subject: Subject) -> None:
    length = reach(subject)
    for name, grown in in_formats(subject, length):
        sequence, query, scale = grown.begin(prompt(length)), grown.queries(1), 2.5 / grown.row[1]
        grown.up_to(sequence, length, by=grown.size + 1)
        for layer in grown.layers:
            first = max(0, length - grown.window) if grown.is_windowed(layer) else 0
            keys, values = grown.cache.read(sequence, layer, list(range(first, length)))
            want, bound = exact(subject, query, keys, values, scale=scale, rotated=name in ROTATED)
            within(grown.cache.attend(sequence, layer, query, scale), want, bound, f"attention over {name} tokens, layer {layer}")


@check("GROUP-08c", "grouped")
def a_step_that_a_format_cannot_hold_changes_nothing(subject: Subject) -> None:
    for name, grown in in_formats(subject, reach(subject), num_layers=2):
        sequence = grown.begin(prompt(reach(subject)))
        grown.up_to(sequence, grown.window, by=grown.size)
        like = grown.sequences[sequence]
        while grown.unseen(like.length) == like.gone and like.length < reach(subject) - 1:
            grown.step(sequence, 1)  # until the next step frees blocks
        free = grown.cache.num_free_blocks
        for rows in _not_storable(subject, (len(grown.layers), 1, *grown.row), name):
            with raises("NonFinite"):
                grown.cache.step(sequence, rows, rows)
            equal(grown.cache.num_free_blocks, free, f"free blocks after a step of tokens that {name} cannot store")
            grown.look(sequence, f"a sequence after a step of tokens that {name} cannot store")


def _not_storable(subject: Subject, shape: tuple[int, ...], format: str) -> Iterator[NDArray]:
    """Yields rows with a NaN in the last layer, and finite rows that would read back infinite, if the format has such rows."""
    rows = np.zeros(shape, np.float32)
    rows[-1, ..., -1] = np.nan
    yield rows
    large = np.full(shape, MAX.get(subject.dtype, LARGEST), np.float32)
    large[..., ::2] *= -1
    decided = subject.level == "exact" or not is_rounding_decisive(format)
    if decided and not np.isfinite(tokens_as(large[0], format).values).all():
        yield large
