"""A prefix cache that serves prompts as an engine does: what a token's keys and values are depends on the salt and all before it.

They are content (see `checking.content`) of a stream that is a hash of these. So what a sequence must read is known from its
tokens alone, and a block that is found for others shows wherever it is read.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.content import pair_of_content
from kvref_conformance.checking.expect import equal
from kvref_conformance.checking.setup import blocks_of
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.paged.counting import layers_of, reserve, room, tables_alone, to_be_filled, with_room
from kvref_conformance.families.paged.known import read_back
from kvref_conformance.outcome import NotOffered

Tokens = Sequence[int]


def prompt(count: int, which: int = 1) -> list[int]:
    """Tokens that no prompt of another number has."""
    return [which * 1000 + position for position in range(count)]


def streams(tokens: Tokens, salt: str = "") -> NDArray:
    """int64 [n]: a hash of the salt and the tokens up to each position."""
    numbers: NDArray = np.array(tokens, np.uint64)
    with np.errstate(over="ignore"):
        mixed = numbers * np.uint64(0x9E3779B97F4A7C15) + np.arange(len(numbers)).astype(np.uint64)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        summed = np.cumsum(mixed ^ (mixed >> np.uint64(32)), dtype=np.uint64) + np.uint64(zlib.crc32(salt.encode()))
    return (summed >> np.uint64(20)).astype(np.uint32).astype(np.int64)


class Served:
    """`cache` with prompts served from it. entries: that there is room for, at least."""

    def __init__(self, subject: Subject, entries: int = 12, cache: Handle | None = None, **sizes: Any) -> None:
        self.subject = subject
        self.cache = with_room(subject, entries, **sizes) if cache is None else cache
        self.size: int = self.cache.config["block_size"]
        self.layers = layers_of(self.cache)
        self.told: dict[int, tuple[list[int], str]] = {}  # what each sequence was begun with
        self.held: list[int] = []  # sequences that keep something there
        self.lies: dict[int, int] = {}  # of a cache of tables alone, by slot: the stream of the token that would lie there

    def match(self, tokens: Tokens, salt: str = "") -> int:
        return int(self.cache.match(list(tokens), *([salt] if salt else [])))

    def begin(self, tokens: Tokens, salt: str = "") -> tuple[int, int]:
        """A new sequence, and its hit: the length that every layer has, and what is there."""
        sequence = self.cache.begin(list(tokens), *([salt] if salt else []))
        lengths = {int(self.cache.length(sequence, layer)) for layer in self.layers}
        equal(len(lengths), 1, f"different lengths among the layers of a sequence that was begun, {sorted(lengths)}")
        self.told[sequence] = list(tokens), salt
        return sequence, lengths.pop()

    def write(self, sequence: int, start: int, stop: int, layers: Iterable[int] | None = None) -> None:
        """What a model would compute of its tokens, from one position to another."""
        if tables_alone(self.subject):
            self.cache.ensure_capacity(sequence, stop)
        for layer in self.layers if layers is None else layers:
            if tables_alone(self.subject):
                self.lies |= zip(self.slots(sequence, layer, stop)[start:], self.streams(sequence, stop)[start:], strict=True)
                continue
            self.cache.write(sequence, layer, start, *self.computed(sequence, layer, range(start, stop)))

    def slots(self, sequence: int, layer: int, stop: int) -> list[int]:
        """Of its first positions, where its table says that they lie."""
        table = blocks_of(self.cache, sequence, layer)
        return [table[position // self.size] * self.size + position % self.size for position in range(stop)]

    def streams(self, sequence: int, stop: int) -> list[int]:
        tokens, salt = self.told[sequence]
        found: list[int] = streams(tokens, salt)[:stop].tolist()
        return found

    def computed(self, sequence: int, layer: int, positions: Sequence[int]) -> tuple[NDArray, NDArray]:
        tokens, salt = self.told[sequence]
        heads, dim = self.cache.config["num_kv_heads"], self.cache.config["head_dim"]
        return pair_of_content(streams(tokens, salt)[list(positions)], layer, positions, heads, dim)

    def serve(self, tokens: Tokens, salt: str = "") -> int:
        """A sequence that has these tokens, found or written, and committed."""
        sequence, hit = self.begin(tokens, salt)
        if hit < len(tokens):
            self.write(sequence, hit, len(tokens))
        self.cache.commit(sequence, list(tokens))
        return sequence

    def seen(self, *prompts: Tokens, salt: str = "") -> None:
        """Prompts that were served and dropped, one after the other."""
        for tokens in prompts:
            self.cache.drop(self.serve(tokens, salt))

    def there(self, *prompts: Tokens, salt: str = "") -> None:
        """Prompts that can be found from now on: seen, and held as well where nobody knows which block is taken next."""
        if not self.subject.limits.switch(self.subject.family, "other_eviction_order"):
            self.seen(*prompts, salt=salt)
            return
        self.subject.need(sequences=len(self.held) + len(prompts) + 1)
        self.held += [self.serve(tokens, salt) for tokens in prompts]

    def release(self) -> None:
        """Drop what is held so that it is there."""
        while self.held:
            self.cache.drop(self.held.pop())

    def look(self, sequence: int, count: int, what: str) -> None:
        """So many tokens are what a model would have computed of them."""
        for layer in self.layers:
            if tables_alone(self.subject):
                lies = [self.lies.get(slot, -1) for slot in self.slots(sequence, layer, count)]
                equal(lies, self.streams(sequence, count), f"what would lie in the blocks of {what}, layer {layer}")
                continue
            got = self.cache.gather(sequence, layer)
            read_back(self.subject, self.cache, got, self.computed(sequence, layer, range(count)), f"{what}, layer {layer}")

    def finds(self, tokens: Tokens, count: int, what: str, salt: str = "") -> None:
        """So many leading tokens of a prompt are found, and read as they must."""
        equal(self.match(tokens, salt), count, f"match of {what}")
        self.begins(tokens, count, what, salt)

    def begins(self, tokens: Tokens, count: int, what: str, salt: str = "") -> None:
        sequence, hit = self.begin(tokens, salt)
        equal(hit, count, f"length of a sequence begun with {what}")
        self.look(sequence, hit, f"what was found of {what}")
        self.cache.drop(sequence)

    def taking(self, entries: int) -> int:
        """A sequence that holds so many entries, without tokens where that can be."""
        sequence: int = self.cache.create()
        reserve(self.subject, self.cache, sequence, entries)
        return sequence


def exactly(subject: Subject, entries: int, **sizes: Any) -> Served:
    """With so many entries free, and no more: where the pool has to be larger, a sequence holds the rest."""
    served = Served(subject, cache=to_be_filled(subject, entries, **sizes))
    if (rest := room(served.cache) - entries) > 0:
        subject.need(sequences=3)
        served.taking(rest)
    return served


def declared_order(subject: Subject) -> None:
    """Raises NotOffered where its limits say that blocks are taken in another order."""
    if subject.limits.switch(subject.family, "other_eviction_order"):
        raise NotOffered("blocks taken in the order of PREFIX-08, where its limits say other_eviction_order")
