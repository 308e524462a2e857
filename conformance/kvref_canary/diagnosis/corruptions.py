"""Damages: changes to the entries that are read from a cache, each a function of layer, head and position."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvref.canary import Oracle
from kvref.canary.oracle import Entry, Spoil

NO_ENTRY = -1
# (layer, head, position, the layer's entries by head, number written at that time) -> the entry read; None: the right entry.
Change = Callable[[int, int, int, Sequence[Sequence[Entry]], int], Entry | None]
PARTS = ("keys and values", "values", "keys")


@dataclass(frozen=True)
class Corruption:
    """A change, its positions [start, stop), and the first query that sees it. heads, layers: the changed ones."""

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
            written = max(self.since, self.start) + 1  # entries written later cannot be read instead
            before = [list(head) for head in entries]
            for head in self.heads:
                for position in range(max(self.start, 0), min(self.stop, len(before[head]))):
                    there = self.change(layer, head, position, before, max(written, position + 1))
                    entries[head][position] = there or before[head][position]

        return spoil


def zeroed_entries(part: str) -> Change:
    """Zeros: a value of zeros carries no digit, and no query matches a key of zeros."""

    def change(layer: int, head: int, position: int, entries: Sequence[Sequence[Entry]], written: int) -> Entry:
        return _replace_part(entries[head][position], Entry(None, [NO_ENTRY] * len(entries), NO_ENTRY), part)

    return change


def entries_of(oracle: Oracle | None, shift: int, part: str) -> Change:
    """The entry `shift` positions later in another sequence, or in this one if `oracle` is None."""

    def change(layer: int, head: int, position: int, entries: Sequence[Sequence[Entry]], written: int) -> Entry | None:
        held = entries[head] if oracle is None else oracle.entries[layer][head]
        if not 0 <= position + shift < (written if oracle is None else len(held)):
            return None
        return _replace_part(entries[head][position], held[position + shift], part)

    return change


def swapped_blocks(by: int, first: int, part: str) -> Change:
    """Two neighboring blocks of `by` tokens are exchanged: block number `first` and the next."""

    def change(layer: int, head: int, position: int, entries: Sequence[Sequence[Entry]], written: int) -> Entry | None:
        there = {first: position + by, first + 1: position - by}.get(position // by, written)
        return _replace_part(entries[head][position], entries[head][there], part) if there < written else None

    return change


def entries_of_layer(clean: Oracle, layer_read: int) -> Change:
    """The entry of another layer. Both must look back: a layer that looks up uses other pairs of its keys."""

    def change(layer: int, head: int, position: int, entries: Sequence[Sequence[Entry]], written: int) -> Entry:
        return clean.entries[layer_read][head][position]

    return change


def entries_of_head(head_read: int) -> Change:
    def change(layer: int, head: int, position: int, entries: Sequence[Sequence[Entry]], written: int) -> Entry:
        return entries[head_read][position]

    return change


def rotated_heads(by: int) -> Change:
    """Each head reads the entry of the head `by` later, cyclically."""

    def change(layer: int, head: int, position: int, entries: Sequence[Sequence[Entry]], written: int) -> Entry:
        return entries[(head + by) % len(entries)][position]

    return change


def rotated_keys(by: int) -> Change:
    """Keys rotated to a position `by` away from their own."""

    def change(layer: int, head: int, position: int, entries: Sequence[Sequence[Entry]], written: int) -> Entry:
        entry = entries[head][position]
        return entry if entry.at is None else replace(entry, at=entry.at + by)

    return change


def _replace_part(own: Entry, read: Entry, part: str) -> Entry:
    if part == "values":
        return replace(own, digit=read.digit)
    return replace(read, digit=own.digit) if part == "keys" else read
