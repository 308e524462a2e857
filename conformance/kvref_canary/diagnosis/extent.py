"""The place of a damage: starts at the first wrong token and moves until the oracle predicts every token of the engine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvref_canary.diagnosis.case import Answers, Case
from kvref_canary.diagnosis.corruptions import Change, Corruption

Extent = tuple[int, int]  # start, stop
MAX_TRIES = {False: 16, True: 4}  # key: the canary recalls; value: how often one change in one set of layers is moved
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)  # of blocks


@dataclass(frozen=True)
class CorruptionExtent:
    """A damage that predicts every token of the engine. It covers only positions that were read.

    open: the damage may extend past the last position that was read. block: the block that contains it; all of it may be damaged.
    """

    damage: Corruption
    said: Answers
    open: bool
    block: tuple[int, int] | None


def fit_corruption(
    case: Case, change: Change, layers: tuple[int, ...], extents: Sequence[Extent], moments: Sequence[int]
) -> CorruptionExtent | None:
    """Return the damage that fits, in one of the extents, from the extent's start or from one of the moments on; else None."""
    tries = 0
    for extent in extents:
        queue = [Corruption(change, layers, case.wrong_heads, *extent, when) for when in dict.fromkeys(moments)]
        if not case.canary.recalls:  # else the layers before the last look back one token: the time of reading shows little
            queue.append(Corruption(change, layers, case.wrong_heads, *extent, extent[0]))
        for damage in queue:
            soon = case.replay(damage.since, damage.spoil, soon=True)
            against = case.conflicts(soon)
            if against and against[0] in case.wrong and soon[against[0]] != case.expected_answers[against[0]]:
                break  # it predicts a different wrong token at every moment
            if against and not any(_resolved_corruptions(case, damage, soon, against)):
                continue
            said = case.replay(damage.since, damage.spoil)
            against = case.conflicts(said)
            if not against:
                return _narrow_to_reads(case, damage, said)
            tries += 1
            if tries < MAX_TRIES[case.canary.recalls]:
                queue += [each for each in _resolved_corruptions(case, damage, said, against) if each not in queue]
    return None


def candidate_extents(case: Case, layers: tuple[int, ...], whole: bool) -> list[Extent]:
    """Return where the wrong tokens were read: from the first one on and, if `whole`, the runs and blocks around them.

    A query compares keys of all positions: the effect of a change at one position depends on where the change ends.
    """
    found = []
    for layer in reversed(layers):
        places = case.places[case.wrong, layer]
        places = places[places >= 0]
        if len(places) == 0:
            continue
        first = int(places[0])
        found.append((first, case.length))
        if whole and not case.canary.recalls:
            run = np.flatnonzero(np.append(np.diff(case.wrong), 2) > 1)[0]  # consecutive wrong tokens
            found += [(first, first + int(run) + 1), (first, first + int(run))]
            found += [(first, (first // size + 1) * size) for size in BLOCK_SIZES[:4]]
        if case.canary.recalls and layer == layers[-1]:
            counts = [(size, *np.unique(places // size, return_counts=True)) for size in BLOCK_SIZES[:4]]
            best = [(size, int(blocks[numbers.argmax()])) for size, blocks, numbers in counts]
            found += [(block * size, (block + 1) * size) for size, block in best]
    return list(dict.fromkeys(found))


def _resolved_corruptions(case: Case, damage: Corruption, said: Answers, against: list[int]) -> Iterator[Corruption]:
    """Resolve a contradiction: move start or moment earlier, move the end before the position that was read, or move it later."""
    at = against[0]
    places = [int(case.places[at, layer]) for layer in damage.layers if case.places[at, layer] >= 0]
    written = case.places[against, -1]  # when the last layer's entries that were read had been written
    if said[at] == case.expected_answers[at]:
        yield from (replace(damage, start=place) for place in places if place < damage.start)
        if 0 <= written[0] < damage.since:
            yield replace(damage, since=int(written.min()))
    elif at not in case.wrong:
        yield from (replace(damage, stop=place) for place in places if damage.start < place < damage.stop)
        after = written[written < case.first_query].max(initial=-1) + 1
        if damage.since < after:
            yield replace(damage, since=int(after))


def _narrow_to_reads(case: Case, damage: Corruption, said: Answers) -> CorruptionExtent | None:
    """Return the same damage, reduced to the positions that were read."""
    told = [number for number in case.wrong if said[number] is None or said[number] != case.expected_answers[number]]
    layers = damage.layers[-1:] if case.canary.recalls else damage.layers  # the position that it finds, not the one before
    seen = [int(place) for place in case.places[told][:, layers].flat if damage.start <= place < damage.stop]
    if not seen:
        return None
    goes_on = damage.stop >= case.length
    tight = replace(damage, start=min(seen), stop=max(seen) + 1)
    again = case.replay(tight.since, tight.spoil)
    if case.conflicts(again) or case.evidence(again) < case.evidence(said):
        return CorruptionExtent(damage, said, goes_on, None)
    return CorruptionExtent(tight, again, goes_on, None if goes_on else _smallest_block(case, tight, again))


def _smallest_block(case: Case, damage: Corruption, said: Answers) -> tuple[int, int] | None:
    """Return the smallest block that may be damaged as a whole, of which the damage covers at least half."""
    for size in BLOCK_SIZES:
        start = damage.start // size * size
        if damage.stop > start + size or 2 * (damage.stop - damage.start) < size:
            continue
        again = case.replay(damage.since, replace(damage, start=start, stop=start + size).spoil)
        if not case.conflicts(again) and case.evidence(again) >= case.evidence(said):
            return start, start + size
    return None
