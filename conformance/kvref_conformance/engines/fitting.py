"""Where a damage lies: from the first wrong token, moved until the oracle foretells all that came."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvref_conformance.engines.damage import Change, Damage
from kvref_conformance.engines.told import Case, Said

Extent = tuple[int, int]  # start, stop
TRIES = {False: 16, True: 4}  # by whether the canary recalls: how often one change in one set of layers is moved
SIZES = (8, 16, 32, 64, 128, 256)  # of blocks


@dataclass(frozen=True)
class Fit:
    """A damage that foretells everything that came. It is as wide as what was read of it.

    open: it may go on behind the last that was read. block: the block in which it lies, all of which may be damaged.
    """

    damage: Damage
    said: Said
    open: bool
    block: tuple[int, int] | None


def fitted(case: Case, change: Change, layers: tuple[int, ...], extents: Sequence[Extent], moments: Sequence[int]) -> Fit | None:
    """The damage of this kind that fits: in one of these extents, seen by all since then, or since one of these moments."""
    tries = 0
    for extent in extents:
        queue = [Damage(change, layers, case.wrong_heads, *extent, when) for when in dict.fromkeys(moments)]
        if not case.canary.recalls:  # whose layers before the last look one token back: when they were read says little
            queue.append(Damage(change, layers, case.wrong_heads, *extent, extent[0]))
        for damage in queue:
            soon = case.replay(damage.since, damage.spoil, soon=True)
            against = case.conflicts(soon)
            if against and against[0] in case.wrong and soon[against[0]] != case.want[against[0]]:
                break  # it foretells another wrong token, whenever it came
            if against and not any(_moved(case, damage, soon, against)):
                continue
            said = case.replay(damage.since, damage.spoil)
            against = case.conflicts(said)
            if not against:
                return _narrowed(case, damage, said)
            tries += 1
            if tries < TRIES[case.canary.recalls]:
                queue += [each for each in _moved(case, damage, said, against) if each not in queue]
    return None


def extents_of(case: Case, layers: tuple[int, ...], whole: bool) -> list[Extent]:
    """Where the wrong tokens were read: from the first one on, and where `whole` the runs and blocks around them.

    Keys are looked for everywhere: what a change does to one place hangs on where it ends.
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
            run = np.flatnonzero(np.append(np.diff(case.wrong), 2) > 1)[0]  # wrong tokens that come one behind the other
            found += [(first, first + int(run) + 1), (first, first + int(run))]
            found += [(first, (first // size + 1) * size) for size in SIZES[:4]]
        if case.canary.recalls and layer == layers[-1]:
            counts = [(size, *np.unique(places // size, return_counts=True)) for size in SIZES[:4]]
            best = [(size, int(blocks[numbers.argmax()])) for size, blocks, numbers in counts]
            found += [(block * size, (block + 1) * size) for size, block in best]
    return list(dict.fromkeys(found))


def _moved(case: Case, damage: Damage, said: Said, against: list[int]) -> Iterator[Damage]:
    """Ways out of a contradiction: it begins or came earlier than supposed, or it ends before what was read, or came later."""
    at = against[0]
    places = [int(case.places[at, layer]) for layer in damage.layers if case.places[at, layer] >= 0]
    written = case.places[against, -1]  # when the last layer's entries that were read had been written
    if said[at] == case.want[at]:
        yield from (replace(damage, start=place) for place in places if place < damage.start)
        if 0 <= written[0] < damage.since:
            yield replace(damage, since=int(written.min()))
    elif at not in case.wrong:
        yield from (replace(damage, stop=place) for place in places if damage.start < place < damage.stop)
        after = written[written < case.begin].max(initial=-1) + 1
        if damage.since < after:
            yield replace(damage, since=int(after))


def _narrowed(case: Case, damage: Damage, said: Said) -> Fit | None:
    """The same damage, no wider than what was read of it."""
    told = [number for number in case.wrong if said[number] is None or said[number] != case.want[number]]
    layers = damage.layers[-1:] if case.canary.recalls else damage.layers  # the place that it finds, not the one before
    seen = [int(place) for place in case.places[told][:, layers].flat if damage.start <= place < damage.stop]
    if not seen:
        return None
    goes_on = damage.stop >= case.length
    tight = replace(damage, start=min(seen), stop=max(seen) + 1)
    again = case.replay(tight.since, tight.spoil)
    if case.conflicts(again) or case.evidence(again) < case.evidence(said):
        return Fit(damage, said, goes_on, None)
    return Fit(tight, again, goes_on, None if goes_on else _block(case, tight, again))


def _block(case: Case, damage: Damage, said: Said) -> tuple[int, int] | None:
    """The smallest block, of which it is half or more, that may be damaged as a whole, for all that came."""
    for size in SIZES:
        start = damage.start // size * size
        if damage.stop > start + size or 2 * (damage.stop - damage.start) < size:
            continue
        again = case.replay(damage.since, replace(damage, start=start, stop=start + size).spoil)
        if not case.conflicts(again) and case.evidence(again) >= case.evidence(said):
            return start, start + size
    return None
