"""A prefix cache that serves prompts as an engine does: keys and values depend on all tokens and media up to their position.

They are content (see testlib/tagged_content.py) of a stream that is a hash of the label and these tokens. A block that is
found for a wrong prompt thus contains other values than the model expects.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.paged.fixture import layers_of, reserve, room, tables_alone, to_be_filled, with_room
from kvref_conformance.families.prefix import MediaItem
from kvref_conformance.families.prefix.model import Prefix
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.testlib.assertions import assert_equal, assert_pair
from kvref_conformance.testlib.session import Session
from kvref_conformance.testlib.tagged_content import content_pair

Tokens = Sequence[int]
OTHER = 77  # a token that is in no prompt


def prompt(count: int, which: int = 1) -> list[int]:
    """Returns a prompt whose tokens are in no prompt with another number."""
    return [which * 1000 + position for position in range(count)]


def streams(tokens: Tokens, salt: str = "", adapter: str = "", media: Sequence[MediaItem] = ()) -> NDArray:
    """Returns int64 [n]: a hash of the salt, the adapter, and the tokens and media up to each position."""
    numbers: NDArray = np.array(tokens, np.uint64)
    for start, stop, content in media:
        numbers[start:stop] += (zlib.crc32(content.encode()) + 1 + np.arange(stop - start)).astype(np.uint64)
    salt += f" with {adapter}" if adapter else ""
    with np.errstate(over="ignore"):
        mixed = numbers * np.uint64(0x9E3779B97F4A7C15) + np.arange(len(numbers)).astype(np.uint64)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        summed = np.cumsum(mixed ^ (mixed >> np.uint64(32)), dtype=np.uint64) + np.uint64(zlib.crc32(salt.encode()))
    return (summed >> np.uint64(20)).astype(np.uint32).astype(np.int64)


class PrefixFixture(Session):
    """A cache from which prompts are served, with room for at least `entries` entries.

    prompts: the tokens and the label of each sequence, from which its keys and values are computed.
    """

    model: Prefix

    def __init__(self, subject: Subject, entries: int = 12, make: Callable[[], ObjectProxy] | None = None, **sizes: Any) -> None:
        super().__init__(subject, make or partial(with_room, subject, entries, **sizes))
        self.size: int = self.cache.config["block_size"]
        self.layers = layers_of(self.cache)
        self.prompts: dict[int, tuple[Any, ...]] = {}

    def hit(self, num_common: int) -> int:
        """Returns the hit of a prompt of which this many tokens, without the last one, are the first of a cached prompt."""
        return num_common if has_token_hits(self.subject) else num_common // self.size * self.size

    def match(self, tokens: Tokens, salt: str = "", adapter: str = "", media: Sequence[MediaItem] = ()) -> int:
        return int(self.cache.match(list(tokens), **_label(salt, adapter, media)))

    def begin(self, tokens: Tokens, salt: str = "", adapter: str = "", media: Sequence[MediaItem] = ()) -> tuple[int, int]:
        """Begins a sequence, and returns it with its hit, which must be the length of every layer."""
        sequence = self.cache.begin(list(tokens), **_label(salt, adapter, media))
        self.prompts[sequence] = tokens, salt, adapter, media
        lengths = [int(self.cache.length(sequence, layer)) for layer in self.layers]
        return sequence, lengths[0]

    def write(self, sequence: int, start: int, stop: int, layers: Iterable[int] | None = None) -> None:
        """Writes the keys and values of the tokens at [start, stop), or ensures the capacity for them if it stores no tokens."""
        if tables_alone(self.subject):
            self.cache.ensure_capacity(sequence, stop)
            self.look()
            return
        for layer in self.layers if layers is None else layers:
            self.cache.write(sequence, layer, start, *self.compute(sequence, layer, range(start, stop)))

    def compute(self, sequence: int, layer: int, positions: Sequence[int]) -> tuple[NDArray, NDArray]:
        """Returns the keys and values of a sequence's prompt at these positions."""
        row = self.cache.config["num_kv_heads"], self.cache.config["head_dim"]
        return content_pair(streams(*self.prompts[sequence])[list(positions)], layer, positions, *row)

    def serve(self, tokens: Tokens, salt: str = "", adapter: str = "", media: Sequence[MediaItem] = ()) -> int:
        """Begins a prompt, writes the tokens after the hit, commits all, and returns the sequence."""
        sequence, hit = self.begin(tokens, salt, adapter, media)
        if hit < len(tokens):
            self.write(sequence, hit, len(tokens))
        self.cache.commit(sequence, list(tokens))
        return sequence

    def serve_and_drop(self, *prompts: Tokens, salt: str = "") -> None:
        for tokens in prompts:
            self.cache.drop(self.serve(tokens, salt))

    def make_cached(self, *prompts: Tokens, salt: str = "") -> list[int]:
        """Serves prompts, and drops their sequences if the order of eviction is known. Returns the sequences that are live."""
        if not self.subject.limits.switch(self.subject.family, "other_eviction_order"):
            self.serve_and_drop(*prompts, salt=salt)
            return []
        self.subject.require_size(sequences=len(self.model.sequences) + len(prompts) + 1)
        return [self.serve(tokens, salt) for tokens in prompts]

    def look(self, *names: str) -> None:
        """Looks at the contents, or at the tables of a cache that stores no tokens: they must list the blocks of the contents."""
        super().look(*(names or (("block_table",) if tables_alone(self.subject) else ())))

    def finds(self, tokens: Tokens, count: int, salt: str = "", adapter: str = "", media: Sequence[MediaItem] = ()) -> None:
        """Raises ClauseViolation unless match and begin find `count` tokens of a prompt, and these read as they must."""
        assert_equal(self.match(tokens, salt, adapter, media), count, "match of a prompt")
        sequence, hit = self.begin(tokens, salt, adapter, media)
        assert_equal(hit, count, "length of a sequence that begins with a prompt")
        self.look()
        self.cache.drop(sequence)

    def stop_judging(self) -> None:
        """Drops the model, which is slow with thousands of blocks. The check then compares the contents itself."""
        del self._runner.models[self.cache.id]

    def compare(self, sequence: int, count: int) -> None:
        """Raises ClauseViolation unless a sequence, if tokens are stored at all, contains the first `count` tokens of its
        prompt.
        """
        for layer in () if tables_alone(self.subject) else self.layers:
            want = self.compute(sequence, layer, range(count))
            assert_pair(self.cache.gather(sequence, layer), want, f"{count} tokens of a prompt, layer {layer}")

    def count_cached(self, *prompts: Tokens) -> list[int]:
        """Returns the number of blocks that match finds of each prompt."""
        return [self.match([*tokens, OTHER]) // self.size for tokens in prompts]

    def allocate(self, entries: int) -> int:
        """Creates a sequence with `entries` entries, without tokens if possible."""
        sequence: int = self.cache.create()
        reserve(self.subject, self.cache, sequence, entries)
        return sequence


def _label(salt: str, adapter: str, media: Sequence[MediaItem]) -> dict[str, Any]:
    """Returns the arguments of a call that are not empty: an implementation may support none of them."""
    given = {"salt": salt, "adapter": adapter, "media": [list(item) for item in media]}
    return {name: value for name, value in given.items() if value}


def with_free_entries(subject: Subject, entries: int, **sizes: Any) -> PrefixFixture:
    """Returns a cache with exactly `entries` free entries. If the pool must be larger, a sequence has the rest."""
    served = PrefixFixture(subject, make=partial(to_be_filled, subject, entries, **sizes))
    if (rest := room(served.cache) - entries) > 0:
        subject.require_size(sequences=3)
        served.allocate(rest)
    return served


def has_token_hits(subject: Subject) -> bool:
    """Returns whether hits contain tokens after their full blocks, according to the limits (PREFIX-19)."""
    return subject.limits.switch(subject.family, "token_hits")


def need_declared_order(subject: Subject) -> None:
    """Raises NotOffered if its limits declare another order of eviction."""
    if subject.limits.switch(subject.family, "other_eviction_order"):
        raise NotOffered("the eviction order of PREFIX-08, where its limits say other_eviction_order")
