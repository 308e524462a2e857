"""Explanations that are searched only if no other one fits, because each of them takes many replays.

Wrong keys hide which entries were read: a key at the position of another token makes a head read a mixture of both. Digits of a
mixture match no token, so that no shift can be derived from them. The likely shifts are therefore tried one by one.
"""

import math
from collections.abc import Iterator

from kvref_canary.diagnosis.case import Case
from kvref_canary.diagnosis.corruptions import Corruption, entries_of, rotated_keys
from kvref_canary.diagnosis.extent import BLOCK_SIZES, CorruptionExtent
from kvref_canary.diagnosis.hypotheses import Hypothesis, score_corruption
from kvref_canary.diagnosis.report import Diagnosis

ROTATIONS = 1, 2, 4, 8, 16, 32, 64  # positions, besides the distances between events
MAX_WRONG = 8  # wrong queries that are considered as ones that matched a foreign key
OVERWRITTEN = 1, 2, 4, 8, 16  # tokens of a write that lands in another sequence


def wide_hypotheses(case: Case) -> Iterator[Hypothesis]:
    """Return the explanations that contradict no token of the engine: overwritten positions only if no wrong rotation fits."""
    rotations = list(_rotations(case))
    yield from rotations or _overwritten_positions(case)


def _moments(case: Case) -> list[int]:
    """The numbers of tokens at the events and at the first generated token, up to the first wrong query."""
    moments = (min(case.request.said, default=len(case.request.tokens)), *(at for at, _ in case.request.events))
    return sorted({at for at in moments if at <= case.first_query + 1})


def _rotations(case: Case) -> Iterator[Hypothesis]:
    """Keys from a position on that are rotated `by` positions too far, up to an event or in all later tokens too."""
    moments, places = _moments(case), sorted({place for place in case.places[case.wrong[0]].tolist() if place >= 0})
    ends = {*moments, *(len(other.tokens) for other in case.others if case.is_earlier_state(other))}
    apart = {late - early for late in ends for early in (0, *moments) if late > early}
    finding = Diagnosis("turned", case.request.name, part="keys")
    sizes = sorted({*ROTATIONS, *apart})
    for size in sizes:
        for by in (-size, size):
            # The first wrong query missed its own key, or matched a key that was rotated to its position.
            starts = {*places, *(place - by for place in places), *moments}
            if case.wrong[0] == 0:  # earlier queries, whose answers are not known, may have been wrong too
                starts |= {place // BLOCK_SIZES[0] * BLOCK_SIZES[0] for place in (*places, *(at - by for at in places))}
            name = math.log2(2 * len(sizes))
            best = max(
                (score_corruption(case, fit, finding, name, by) for fit in _rotated_fits(case, by, sorted(starts), moments)),
                key=lambda each: each.score,
                default=None,
            )
            if best is not None:
                yield best


def _rotated_fits(case: Case, by: int, starts: list[int], moments: list[int]) -> Iterator[CorruptionExtent]:
    change, heads, layers = rotated_keys(by), tuple(range(case.canary.num_kv_heads)), tuple(range(case.canary.num_layers))
    for start in (start for start in starts if 0 < start < case.length):
        yield from _fit(case, Corruption(change, layers, heads, start, case.length, start))
        for stop in (stop for stop in moments if stop > start):
            yield from _fit(case, Corruption(change, layers, heads, start, stop, stop))


def _overwritten_positions(case: Case) -> Iterator[Hypothesis]:
    """Positions that contain another sequence's entries of other positions, since an event or the first wrong query.

    The overwritten position is the one that the first wrong query should have read. A later wrong query shows the position for
    which the other key was rotated, because it matches that key besides its own.
    """
    heads, moments = tuple(range(case.canary.num_kv_heads)), _moments(case)[-2:]
    layers = tuple(range(case.canary.num_layers))
    starts = sorted({place for place in case.places[case.wrong[0]].tolist() if place >= 0})
    matched = sorted({int(place) for place in case.places[case.wrong[:MAX_WRONG]].flat if place >= 0})
    for other in case.others:
        for start in starts:
            for shift in (place - start for place in matched if place not in (start, len(other.tokens))):
                finding = Diagnosis(
                    "earlier occupant" if other.ended else "another", case.request.name, other=other.name, shift=shift
                )
                change = entries_of(case.oracle_of(other), shift, "keys and values")
                name = math.log2(len(case.others) * len(other.tokens))
                for count in OVERWRITTEN:
                    for since in moments:
                        for fit in _fit(case, Corruption(change, layers, heads, start, start + count, since)):
                            yield score_corruption(case, fit, finding, name, shift)


def _fit(case: Case, damage: Corruption) -> Iterator[CorruptionExtent]:
    """Return the damage if it contradicts no token of the engine."""
    if not case.conflicts(case.replay(damage.since, damage.spoil, soon=True)):
        said = case.replay(damage.since, damage.spoil)
        if not case.conflicts(said):
            yield CorruptionExtent(damage, said, damage.stop >= case.length, None)
