"""What may have been read instead: changes to a cache's entries, each as a function of layer, head and position."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvref.canary import Oracle
from kvref.canary.oracle import Entry, Spoil

NOTHING = -1
# (layer, head, position, the layer's entries by head, how many were written then) to what is read there; None: what should be.
Change = Callable[[int, int, int, Sequence[Sequence[Entry]], int], Entry | None]
PARTS = ("keys and values", "values", "keys")


@dataclass(frozen=True)
class Damage:
    """A change, where, and from which query on. heads, layers: those that it befell."""

    change: Change
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    start: int
    stop: int
    since: int

    @property
    def spoil(self) -> Spoil:
        def spoil(layer: int, entries: list[list[Entry]]) -> None:
            if layer not in self.layers:
                return
            written = max(self.since, self.start) + 1  # of what came later none can be read instead
            before = [list(head) for head in entries]
            for head in self.heads:
                for position in range(max(self.start, 0), min(self.stop, len(before[head]))):
                    there = self.change(layer, head, position, before, max(written, position + 1))
                    entries[head][position] = there or before[head][position]

        return spoil


def zeros(part: str) -> Change:
    """Zeros: in values they say "nothing", and keys of zeros are found by no query."""

    def change(layer: int, head: int, position: int, entries: Sequence[Sequence[Entry]], written: int) -> Entry:
        return _part(entries[head][position], Entry(None, [NOTHING] * len(entries), NOTHING), part)

    return change


def elsewhere(oracle: Oracle | None, shift: int, part: str) -> Change:
    """What another sequence, or with None this one, holds `shift` further on."""

    def change(layer: int, head: int, position: int, entries: Sequence[Sequence[Entry]], written: int) -> Entry | None:
        held = entries[head] if oracle is None else oracle.entries[layer][head]
        if not 0 <= position + shift < (written if oracle is None else len(held)):
            return None
        return _part(entries[head][position], held[position + shift], part)

    return change


def swapped(by: int, first: int, part: str) -> Change:
    """Two neighbouring blocks of `by` each read as the other, block number `first` and the next."""

    def change(layer: int, head: int, position: int, entries: Sequence[Sequence[Entry]], written: int) -> Entry | None:
        there = {first: position + by, first + 1: position - by}.get(position // by, written)
        return _part(entries[head][position], entries[head][there], part) if there < written else None

    return change


def other_layer(clean: Oracle, layer_read: int) -> Change:
    """Of layers that look back: what another looks up by lies in other pairs of its keys."""

    def change(layer: int, head: int, position: int, entries: Sequence[Sequence[Entry]], written: int) -> Entry:
        return clean.entries[layer_read][head][position]

    return change


def other_head(head_read: int) -> Change:
    def change(layer: int, head: int, position: int, entries: Sequence[Sequence[Entry]], written: int) -> Entry:
        return entries[head_read][position]

    return change


def heads_turned(by: int) -> Change:
    """Each head holds what the head `by` further on should, the last ones what the first."""

    def change(layer: int, head: int, position: int, entries: Sequence[Sequence[Entry]], written: int) -> Entry:
        return entries[(head + by) % len(entries)][position]

    return change


def turned(by: int) -> Change:
    """Keys turned to a position that is not theirs."""

    def change(layer: int, head: int, position: int, entries: Sequence[Sequence[Entry]], written: int) -> Entry:
        entry = entries[head][position]
        return entry if entry.at is None else replace(entry, at=entry.at + by)

    return change


def _part(own: Entry, read: Entry, part: str) -> Entry:
    if part == "values":
        return replace(own, digit=read.digit)
    return replace(read, digit=own.digit) if part == "keys" else read
