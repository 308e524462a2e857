"""A paged cache that serves sequences of computed content. Their tokens and the number of free blocks are known independently."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.soak.cache_workload import WorkloadEvent
from kvref_conformance.testlib.assertions import assert_equal, assert_true, raises
from kvref_conformance.testlib.fixtures import new_object
from kvref_conformance.testlib.tagged_content import PREFIXES, WrittenContent, assert_content, content_pair, token_content

CHUNK = 512  # tokens of a prompt per write


@dataclass
class SoakSequence:
    """A sequence: its id in the cache, the length of each layer, and the number of table entries."""

    id: int
    lengths: list[int]
    blocks: int = 0
    shared: tuple[int, int] = (0, 0)  # (stream of the shared prefix, its number of tokens)


class SoakPagedCache:
    """Sequences in a paged cache. Each has a number, counted from 0, which is its stream of content."""

    def __init__(self, subject: Subject, **sizes: Any) -> None:
        self.subject, self.cache = subject, new_object(subject, subject.family, **sizes)
        self.config = self.cache.config
        if self.config["num_blocks"] < self.config["num_layers"]:
            raise NotOffered(
                f"one block per layer, where its limits say num_blocks {subject.limits.limit(subject.family, 'num_blocks')}"
            )
        self.layers, self.size = range(self.config["num_layers"]), int(self.config["block_size"])
        self.written = WrittenContent(self.config["num_kv_heads"], self.config["head_dim"])
        self.live: dict[int, SoakSequence] = {}
        self.created = 0

    @property
    def free(self) -> int:
        """The number of free blocks."""
        total: int = self.config["num_blocks"] - len(self.layers) * sum(each.blocks for each in self.live.values())
        return total

    def entries(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def create(self, number: int | None = None) -> int:
        number, id = self.created if number is None else number, self.cache.create()
        assert_true(id not in {each.id for each in self.live.values()}, "the id of a new sequence", "an id not in use", id)
        self.live[number] = SoakSequence(id, [0 for _ in self.layers])
        self.created = number + 1
        return number

    def more(self, numbers: Iterable[int], tokens: int = 1, layer: int | None = None) -> int:
        """Returns how many blocks `tokens` more tokens per sequence need, in one layer or in all."""
        entries = 0
        for number in numbers:
            one = self.live[number]
            longest = max(one.lengths) if layer is None else one.lengths[layer]
            entries += max(0, self.entries(longest + tokens) - one.blocks)
        return len(self.layers) * entries

    def fits(self, numbers: Iterable[int], tokens: int = 1) -> bool:
        return self.more(numbers, tokens) <= self.free

    def allows_length(self, tokens: int) -> bool:
        """Returns whether there is room for another sequence with `tokens` tokens."""
        return len(self.layers) * self.entries(tokens) <= self.free

    def reserve(self, number: int, tokens: int) -> None:
        one = self.live[number]
        self.cache.ensure_capacity(one.id, tokens)
        one.blocks = max(one.blocks, self.entries(tokens))

    def write(self, number: int, tokens: int, layers: Iterable[int] | None = None) -> None:
        """Writes `tokens` more tokens in every layer or in some."""
        for layer in self.layers if layers is None else layers:
            one = self.live[number]
            start, stop = one.lengths[layer], one.lengths[layer] + tokens
            self.cache.write(one.id, layer, start, *self._given(number, layer, range(start, stop)))
            one.blocks, one.lengths[layer] = max(one.blocks, self.entries(stop)), stop
            self.written.add_up_to(number, layer, stop)
            self.written.add_up_to(one.shared[0], layer, min(stop, one.shared[1]))

    def fill(self, number: int, tokens: int, layers: Iterable[int] | None = None) -> None:
        """Writes `tokens` more tokens per layer, or as many as there are blocks for."""
        for layer in self.layers if layers is None else layers:
            one = self.live[number]
            room = (one.blocks + self.free // len(self.layers)) * self.size - one.lengths[layer]
            if min(tokens, room) > 0:
                self.write(number, min(tokens, room), layers=[layer])

    def refused(self, number: int, tokens: int) -> None:
        """Raises ClauseViolation unless ensure_capacity, if provided, raises OutOfBlocks for that many more tokens."""
        with suppress(NotOffered), raises("OutOfBlocks"):
            self.cache.ensure_capacity(self.live[number].id, max(self.live[number].lengths) + tokens)
        self.counted()

    def step(self, numbers: Sequence[int]) -> None:
        """Appends one token per sequence in every layer."""
        ones = [self.live[number] for number in numbers]
        parts = []
        for part in (0, 1):
            rows = [
                token_content(numbers, layer, [one.lengths[layer] for one in ones], self.written.heads, self.written.dim, part)
                for layer in self.layers
            ]
            parts.append(np.stack(rows))
        self.cache.append_step([one.id for one in ones], *parts)
        for number, one in zip(numbers, ones, strict=True):
            for layer in self.layers:
                one.lengths[layer] += 1
                self.written.add_up_to(number, layer, one.lengths[layer])
            one.blocks = max(one.blocks, self.entries(max(one.lengths)))

    def drop(self, number: int) -> None:
        self.cache.drop(self.live[number].id)
        del self.live[number]

    def look(self, number: int, layers: Iterable[int] | None = None) -> None:
        """Raises ClauseViolation unless every token of a sequence is right, in every layer or in some."""
        one = self.live[number]
        for layer in self.layers if layers is None else layers:
            assert_equal(self.cache.length(one.id, layer), one.lengths[layer], f"length of sequence {number}, layer {layer}")
            self._belongs(self.cache.gather(one.id, layer), number, layer, range(one.lengths[layer]))

    def look_at(self, number: int, layer: int, positions: Sequence[int]) -> None:
        self._belongs(self.cache.read(self.live[number].id, layer, list(positions)), number, layer, positions)

    def look_at_batch(self, numbers: Sequence[int], layer: int) -> None:
        """Raises ClauseViolation unless gather_batch and lengths are right for several sequences."""
        ids, lengths = [self.live[n].id for n in numbers], [self.live[n].lengths[layer] for n in numbers]
        assert_equal([int(each) for each in self.cache.lengths(ids, layer)], lengths, f"lengths in layer {layer}")
        keys, values, offsets = self.cache.gather_batch(ids, layer)
        assert_equal([int(each) for each in offsets], [0, *np.cumsum(lengths).tolist()], f"offsets in layer {layer}")
        for number, start, length in zip(numbers, offsets, lengths, strict=False):
            part = slice(int(start), int(start) + length)
            self._belongs((keys[part], values[part]), number, layer, range(length))

    def counted(self) -> None:
        """Raises ClauseViolation unless the reported number of free blocks, if provided, is right."""
        with suppress(NotOffered):
            assert_equal(self.cache.num_free_blocks, self.free, f"free blocks with {len(self.live)} sequences")

    def owned(self) -> None:
        """Raises ClauseViolation if the tables, if provided, list a block twice or one outside the pool."""
        with suppress(NotOffered):
            self._owned()

    def _owned(self) -> None:
        numbers = list(self.live)
        held = []
        for layer in self.layers:
            tables = np.asarray(self.cache.block_tables([self.live[number].id for number in numbers], layer))
            held += [int(block) for row, number in enumerate(numbers) for block in tables[row, : self.live[number].blocks]]
        assert_true(
            len(set(held)) == len(held),
            "number of distinct blocks in the tables of all sequences",
            f"{len(held)}, one per table entry",
            len(set(held)),
        )
        inside = all(0 <= block < self.config["num_blocks"] for block in held)
        assert_true(inside, "the largest id in the tables", f"an id in [0, {self.config['num_blocks']})", sorted(held)[-1:])

    def streams(self, number: int, positions: Sequence[int]) -> NDArray:
        """Returns the stream of content at each of these positions."""
        prefix, shared = self.live[number].shared
        return np.where(np.array(positions, np.int64) < shared, prefix, number)

    def _given(self, number: int, layer: int, positions: range) -> tuple[NDArray, NDArray]:
        return content_pair(self.streams(number, positions), layer, positions, self.written.heads, self.written.dim)

    def _belongs(self, got: Any, number: int, layer: int, positions: Sequence[int]) -> None:
        assert_content(got, self.streams(number, positions), layer, positions, self.written)


class PagedSoakDriver:
    """Serves requests from `SoakPagedCache`. A request is a sequence.

    Prompts are written in chunks, outputs in steps of all requests.
    """

    def __init__(self, pages: SoakPagedCache) -> None:
        self.pages = pages
        self.max_sequences = pages.subject.size("sequences", 64)
        self.max_tokens = pages.config["num_blocks"] // len(pages.layers) * pages.size // (4 if self.max_sequences > 1 else 1)
        self.steps = 0

    def running_requests(self) -> Sequence[int]:
        return list(self.pages.live)

    def fits(self, numbers: Sequence[int], tokens: int = 1) -> bool:
        return self.pages.fits(numbers, tokens)

    def allows_length(self, tokens: int) -> bool:
        return self.pages.allows_length(tokens)

    def tokens(self, number: int) -> int:
        return self.pages.live[number].lengths[0]

    def run_event(self, event: WorkloadEvent) -> int:
        """Handles an event. Returns how many tokens were compared."""
        pages, numbers = self.pages, [number for number in event.numbers if number in self.pages.live]
        if event.kind == "admit":
            if len(pages.live) < self.max_sequences and self.allows_length(event.tokens):
                self._admit(event)
        elif not numbers:
            return 0
        elif event.kind == "step" and pages.fits(numbers):
            pages.step(numbers)
            self.steps += 1
            if self.steps % 16 == 0:
                pages.counted()
        elif event.kind == "look":
            return self._look(numbers[0])
        elif event.kind == "drop":
            pages.drop(numbers[0])
            pages.counted()
        elif event.kind == "pressure" and not pages.fits(numbers[:1], event.tokens):
            pages.refused(numbers[0], event.tokens)
        return 0

    def _admit(self, event: WorkloadEvent) -> None:
        number = self.pages.create(event.numbers[0])
        self.pages.live[number].shared = PREFIXES + event.prefix, event.shared
        for start in range(0, event.tokens, CHUNK):
            self.pages.write(number, min(CHUNK, event.tokens - start))

    def _look(self, number: int) -> int:
        """Compares a sequence by one of three ways of reading, depending on its number. Returns the number of tokens."""
        pages, length = self.pages, self.tokens(number)
        with suppress(NotOffered):
            if number % 3 == 0:
                for layer in pages.layers:
                    pages.look_at_batch([number], layer)
                return length * len(pages.layers)
            if number % 3 == 1:
                for layer in pages.layers:
                    pages.look_at(number, layer, list(range(length - 1, -1, -3)))
                pages.owned()
                return -(-length // 3) * len(pages.layers)
        pages.look(number)
        return length * len(pages.layers)


def server(subject: Subject, heads: int, dim: int) -> PagedSoakDriver:
    """Returns a server with room for some dozens of requests, half a gigabyte of float32."""
    return PagedSoakDriver(
        SoakPagedCache(subject, num_blocks=4096, block_size=16, num_layers=2, num_kv_heads=heads, head_dim=dim)
    )
