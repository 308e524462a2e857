"""A prefix cache that serves prompts as an engine does: keys and values depend on the salt and all tokens up to their position.

They are content (see `checking.content`) of a stream that is a hash of the salt and these tokens. The expected reads of a
sequence thus follow from its tokens, and a block that was found for a wrong prompt is noticed when it is read.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.paged.block_accounting import layers_of, reserve, room, tables_alone, to_be_filled, with_room
from kvref_conformance.families.paged.fixture import read_back
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.outcome import NotOffered
from kvref_conformance.testlib.assertions import assert_equal
from kvref_conformance.testlib.fixtures import blocks_of
from kvref_conformance.testlib.tagged_content import pair_of_content

Tokens = Sequence[int]


def prompt(count: int, which: int = 1) -> list[int]:
    """Returns a prompt whose tokens are in no prompt with another number."""
    return [which * 1000 + position for position in range(count)]


def streams(tokens: Tokens, salt: str = "") -> NDArray:
    """Returns int64 [n]: a hash of the salt and the tokens up to each position."""
    numbers: NDArray = np.array(tokens, np.uint64)
    with np.errstate(over="ignore"):
        mixed = numbers * np.uint64(0x9E3779B97F4A7C15) + np.arange(len(numbers)).astype(np.uint64)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        summed = np.cumsum(mixed ^ (mixed >> np.uint64(32)), dtype=np.uint64) + np.uint64(zlib.crc32(salt.encode()))
    return (summed >> np.uint64(20)).astype(np.uint32).astype(np.int64)


class PrefixFixture:
    """A cache from which prompts are served. entries: the least number of entries for which it has room."""

    def __init__(self, subject: Subject, entries: int = 12, cache: ObjectProxy | None = None, **sizes: Any) -> None:
        self.subject = subject
        self.cache = with_room(subject, entries, **sizes) if cache is None else cache
        self.size: int = self.cache.config["block_size"]
        self.layers = layers_of(self.cache)
        self.told: dict[int, tuple[list[int], str]] = {}  # sequence -> (prompt, salt)
        self.held: list[int] = []  # live sequences that keep their blocks from eviction
        self.lies: dict[int, int] = {}  # if it stores no tokens: slot -> stream of the token that belongs there

    def match(self, tokens: Tokens, salt: str = "") -> int:
        return int(self.cache.match(list(tokens), *([salt] if salt else [])))

    def begin(self, tokens: Tokens, salt: str = "") -> tuple[int, int]:
        """Begins a sequence, and returns it with its hit, which must be the length of every layer."""
        sequence = self.cache.begin(list(tokens), *([salt] if salt else []))
        lengths = {int(self.cache.length(sequence, layer)) for layer in self.layers}
        assert_equal(len(lengths), 1, f"number of distinct lengths of a new sequence's layers, which are {sorted(lengths)}")
        self.told[sequence] = list(tokens), salt
        return sequence, lengths.pop()

    def write(self, sequence: int, start: int, stop: int, layers: Iterable[int] | None = None) -> None:
        """Writes the keys and values of the tokens at [start, stop)."""
        if tables_alone(self.subject):
            self.cache.ensure_capacity(sequence, stop)
        for layer in self.layers if layers is None else layers:
            if tables_alone(self.subject):
                self.lies |= zip(self.slots(sequence, layer, stop)[start:], self.streams(sequence, stop)[start:], strict=True)
                continue
            self.cache.write(sequence, layer, start, *self.computed(sequence, layer, range(start, stop)))

    def slots(self, sequence: int, layer: int, stop: int) -> list[int]:
        """Returns the slots of the first `stop` positions by the block table."""
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
        """Begins a prompt, writes the tokens after the hit, commits all, and returns the sequence."""
        sequence, hit = self.begin(tokens, salt)
        if hit < len(tokens):
            self.write(sequence, hit, len(tokens))
        self.cache.commit(sequence, list(tokens))
        return sequence

    def seen(self, *prompts: Tokens, salt: str = "") -> None:
        """Serves and drops prompts, in order."""
        for tokens in prompts:
            self.cache.drop(self.serve(tokens, salt))

    def there(self, *prompts: Tokens, salt: str = "") -> None:
        """Makes prompts cached: serves them, and keeps their sequences live if the order of eviction is not known."""
        if not self.subject.limits.switch(self.subject.family, "other_eviction_order"):
            self.seen(*prompts, salt=salt)
            return
        self.subject.need(sequences=len(self.held) + len(prompts) + 1)
        self.held += [self.serve(tokens, salt) for tokens in prompts]

    def release(self) -> None:
        """Drops the sequences that `there` keeps live."""
        while self.held:
            self.cache.drop(self.held.pop())

    def look(self, sequence: int, count: int, what: str) -> None:
        """Raises Broken unless the first `count` tokens of a sequence read as its prompt requires."""
        for layer in self.layers:
            if tables_alone(self.subject):
                lies = [self.lies.get(slot, -1) for slot in self.slots(sequence, layer, count)]
                assert_equal(
                    lies,
                    self.streams(sequence, count),
                    f"numbers of the streams to which the tokens in the blocks of {what} belong, layer {layer}",
                )
                continue
            got = self.cache.gather(sequence, layer)
            read_back(self.subject, self.cache, got, self.computed(sequence, layer, range(count)), f"{what}, layer {layer}")

    def finds(self, tokens: Tokens, count: int, what: str, salt: str = "") -> None:
        """Raises Broken unless match and begin find `count` tokens of a prompt, and these read as they must."""
        assert_equal(self.match(tokens, salt), count, f"match of {what}")
        self.begins(tokens, count, what, salt)

    def begins(self, tokens: Tokens, count: int, what: str, salt: str = "") -> None:
        sequence, hit = self.begin(tokens, salt)
        assert_equal(hit, count, f"length of a sequence that begins with {what}")
        self.look(sequence, hit, f"the hit of {what}")
        self.cache.drop(sequence)

    def taking(self, entries: int) -> int:
        """Creates a sequence with `entries` entries, without tokens if possible."""
        sequence: int = self.cache.create()
        reserve(self.subject, self.cache, sequence, entries)
        return sequence


def exactly(subject: Subject, entries: int, **sizes: Any) -> PrefixFixture:
    """Returns a cache with exactly `entries` free entries. If the pool must be larger, a sequence has the rest."""
    served = PrefixFixture(subject, cache=to_be_filled(subject, entries, **sizes))
    if (rest := room(served.cache) - entries) > 0:
        subject.need(sequences=3)
        served.taking(rest)
    return served


def declared_order(subject: Subject) -> None:
    """Raises NotOffered if its limits declare another order of eviction."""
    if subject.limits.switch(subject.family, "other_eviction_order"):
        raise NotOffered("the eviction order of PREFIX-08, where its limits say other_eviction_order")
