"""A paged cache that serves sequences of computed content. Their tokens and the number of free blocks are known independently."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvref_conformance.calls.derived_operations import SPLIT_MARK
from kvref_conformance.calls.messages import error_kinds
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.soak.cache_workload import WorkloadEvent
from kvref_conformance.testlib.assertions import (
    assert_equal,
    assert_true,
    assert_within,
    default_scale,
    expected_attention,
    raises,
)
from kvref_conformance.testlib.fixtures import new_object
from kvref_conformance.testlib.tagged_content import (
    KEYS,
    MAX_EDITS,
    PREFIXES,
    SequenceContent,
    WrittenContent,
    assert_content,
    content_pair,
)

CHUNK = 512  # tokens of a prompt per write, and of a sequence that is saved or attended to
NO_BLOCK = -1  # in a block table: a released entry, or padding


@dataclass
class SoakSequence:
    """A sequence: its id in the cache, its content, and the length of each layer.

    blocks, least: the largest and the least number of its table entries. shared: how many of its tokens are a shared prefix.
    released: the first position that is not released. committed: how many tokens a prefix cache has to find while the sequence
    lives. forked: whether it was forked, or is a fork.
    """

    id: int
    content: SequenceContent
    lengths: list[int]
    blocks: int = 0
    least: int = 0
    shared: int = 0
    released: int = 0
    committed: int = 0
    forked: bool = False

    def reserve(self, entries: int) -> None:
        """Record that the table has this many entries, or more."""
        self.blocks, self.least = max(self.blocks, entries), max(self.least, entries)


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
        """The number of blocks that are free for sure: all, except one for each entry that a table can have."""
        total: int = self.config["num_blocks"] - len(self.layers) * sum(
            each.blocks - each.released // self.size for each in self.live.values()
        )
        return total

    @property
    def most_free(self) -> int:
        """The largest possible number of free blocks, if blocks past the end were freed and forks share all of theirs."""
        own = [(each.least - each.released // self.size, each) for each in self.live.values()]
        entries = sum(count for count, each in own if not each.forked) + max((n for n, each in own if each.forked), default=0)
        total: int = self.config["num_blocks"] - len(self.layers) * entries
        return total

    def entries(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def create(self, number: int | None = None, content: SequenceContent | None = None) -> int:
        number = self.created if number is None else number
        self._add(number, self.cache.create(), content or SequenceContent(number))
        return number

    def _add(self, number: int, id: int, content: SequenceContent) -> SoakSequence:
        assert_true(id not in {each.id for each in self.live.values()}, "the id of a new sequence", "an id not in use", id)
        self.live[number] = SoakSequence(id, content, [0 for _ in self.layers])
        self.created = max(self.created, number + 1)
        return self.live[number]

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

    def allows_copy(self, number: int) -> bool:
        """Returns whether there is room for a copy of every block of the sequence."""
        return len(self.layers) * self.live[number].blocks <= self.free

    def reserve(self, number: int, tokens: int) -> None:
        one = self.live[number]
        self.cache.ensure_capacity(one.id, tokens)
        one.reserve(self.entries(tokens))

    def write(self, number: int, tokens: int, layers: Iterable[int] | None = None) -> None:
        """Writes `tokens` more tokens in every layer or in some."""
        for layer in self.layers if layers is None else layers:
            one = self.live[number]
            where = range(one.lengths[layer], one.lengths[layer] + tokens)
            self.cache.write(one.id, layer, where.start, *self._content(one, layer, where))
            one.lengths[layer] = where.stop
            one.reserve(self.entries(where.stop))
            self.written.add_range(one.content, layer, where)

    def fill(self, number: int, tokens: int, layers: Iterable[int] | None = None) -> None:
        """Writes `tokens` more tokens per layer, or as many as there are blocks for."""
        for layer in self.layers if layers is None else layers:
            one = self.live[number]
            room = (one.blocks + self.free // len(self.layers)) * self.size - one.lengths[layer]
            if min(tokens, room) > 0:
                self.write(number, min(tokens, room), layers=[layer])

    def step(self, numbers: Sequence[int], layer_by_layer: bool = False) -> None:
        """Appends one token per sequence in every layer, in one call or in one per layer. Raises NotOffered."""
        ones = [self.live[number] for number in numbers]
        ids, (keys, values) = [one.id for one in ones], self._step_content(ones)
        if layer_by_layer:
            for layer in self.layers:
                self.cache.append(ids, layer, keys[layer], values[layer])
        else:
            self.cache.append_step(ids, keys, values)
        for one in ones:
            for layer in self.layers:
                stream, place = one.content.end(one.lengths[layer])
                self.written.add_up_to(stream, layer, place + 1)
                one.lengths[layer] += 1
            one.reserve(self.entries(max(one.lengths)))

    def _step_content(self, ones: Sequence[SoakSequence]) -> tuple[NDArray, NDArray]:
        """Keys and values [layers, sequences, heads, dim] of the next token of each sequence."""
        layers = [content_pair(*self._ends(ones, layer), self.written.heads, self.written.dim) for layer in self.layers]
        return np.stack([keys for keys, _ in layers]), np.stack([values for _, values in layers])

    def _ends(self, ones: Sequence[SoakSequence], layer: int) -> tuple[list[int], int, list[int]]:
        ends = [one.content.end(one.lengths[layer]) for one in ones]
        return [stream for stream, _ in ends], layer, [place for _, place in ends]

    def drop(self, number: int) -> None:
        self.cache.drop(self.live[number].id)
        del self.live[number]

    # Edits. Each raises NotOffered, and changes nothing, if the cache lacks the operation.

    def fork(self, number: int, child: int) -> None:
        one = self.live[number]
        new = self._add(child, self.cache.fork(one.id), one.content.fork(child, max(one.lengths)))
        new.lengths, new.blocks, new.least, new.released = list(one.lengths), one.blocks, one.least, one.released
        one.forked = new.forked = True

    def truncate(self, number: int, length: int) -> None:
        one = self.live[number]
        self.cache.truncate(one.id, length)
        one.content.truncate(length)
        self._cut(one, length, [min(length, each) for each in one.lengths])

    def remove(self, number: int, start: int, stop: int) -> None:
        one = self.live[number]
        self.cache.remove(one.id, start, stop)
        one.content.remove(start, stop)
        self._cut(one, start, [each - (stop - start) for each in one.lengths])

    def _cut(self, one: SoakSequence, unchanged: int, lengths: list[int]) -> None:
        one.lengths, one.released = lengths, one.released if unchanged else 0
        one.least = min(one.least, self.entries(max(lengths)))
        one.shared, one.committed = min(one.shared, unchanged), min(one.committed, unchanged)

    def release_before(self, number: int, position: int) -> None:
        one = self.live[number]
        self.cache.release_before(one.id, position)
        one.released = max(one.released, position // self.size * self.size)
        one.committed = 0

    def move(self, number: int) -> None:
        """Saves a sequence, loads it into a new one, and drops the old one."""
        one = self.live[number]
        data = self.cache.as_is("save", one.id)
        new = int(self.cache.create())
        try:
            self.cache.load(new, data)
        except NotOffered:
            self.cache.drop(new)
            raise
        self.cache.drop(one.id)
        entries = self.entries(max(one.lengths))
        one.id, one.blocks, one.least, one.committed, one.forked = new, entries, entries, 0, False

    # Out of room. Each call needs more blocks than can be free, has to raise OutOfBlocks, and has to change nothing.

    def refuse(self, number: int) -> None:
        """Asks for one block per layer too many, then writes one block too many."""
        one, most = self.live[number], self._free_blocks()
        tokens = (one.blocks + most // len(self.layers) + 1) * self.size
        with suppress(NotOffered), raises("OutOfBlocks"):
            self.cache.ensure_capacity(one.id, tokens)
        where = range(one.lengths[-1], (one.blocks + most) * self.size + 1)
        if len(where) <= CHUNK:
            self._refused(
                partial(self.cache.write, one.id, self.layers[-1], where.start), self._content(one, -1, where), [number]
            )
        self.counted()

    def refuse_step(self, numbers: Sequence[int]) -> None:
        """Appends one token to more sequences than there are blocks for."""
        ones = [self.live[number] for number in numbers]
        if self.more(numbers) > self._free_blocks():
            self._refused(partial(self.cache.append_step, [one.id for one in ones]), self._step_content(ones), numbers)
            self.counted()

    def _refused(self, call: Any, content: tuple[NDArray, NDArray], numbers: Sequence[int]) -> None:
        """Drops the sequences if the call is derived from several, of which the first ones were made."""

        def made() -> None:
            try:
                call(*content)
            except Exception as error:
                if SPLIT_MARK in vars(error) and "OutOfBlocks" in error_kinds(error):
                    for number in numbers:
                        self.drop(number)
                raise

        with suppress(NotOffered), raises("OutOfBlocks"):
            made()

    def _free_blocks(self) -> int:
        """The largest possible number of free blocks; the exact number if the cache has tables."""
        with suppress(NotOffered):
            return int(self.config["num_blocks"] - len(self._listed()))
        return self.most_free

    # Reads. Each raises ClauseViolation unless what the cache returns is right.

    def look(self, number: int, layers: Iterable[int] | None = None) -> None:
        """Every token of a sequence, in every layer or in some."""
        one = self.live[number]
        for layer in self.layers if layers is None else layers:
            assert_equal(self.cache.length(one.id, layer), one.lengths[layer], f"length of sequence {number}, layer {layer}")
            self._belongs(self.cache.gather(one.id, layer), one, layer, range(one.released, one.lengths[layer]))

    def look_at(self, number: int, layer: int, positions: Sequence[int]) -> None:
        one = self.live[number]
        self._belongs(self.cache.read(one.id, layer, list(positions)), one, layer, positions)

    def look_at_batch(self, numbers: Sequence[int], layer: int) -> None:
        """gather_batch and lengths of several sequences, none of which is released."""
        ones = [self.live[number] for number in numbers]
        ids, lengths = [one.id for one in ones], [one.lengths[layer] for one in ones]
        assert_equal([int(each) for each in self.cache.lengths(ids, layer)], lengths, f"lengths in layer {layer}")
        keys, values, offsets = self.cache.gather_batch(ids, layer)
        assert_equal([int(each) for each in offsets], [0, *np.cumsum(lengths).tolist()], f"offsets in layer {layer}")
        for one, start, length in zip(ones, offsets, lengths, strict=False):
            part = slice(int(start), int(start) + length)
            self._belongs((keys[part], values[part]), one, layer, range(length))

    def attend(self, number: int, layer: int) -> None:
        """One query for all tokens of a sequence."""
        one = self.live[number]
        keys, values = self._content(one, layer, range(one.released, one.lengths[layer]))
        heads = self.written.heads * self.subject.size("group_size", 2)
        query = SequenceContent(number).pair(layer, [one.lengths[layer]], heads, self.written.dim)[KEYS]
        scale = default_scale(self.subject) / 64
        want, bound = expected_attention(self.subject, query, keys, values, scale=scale)
        assert_within(self.cache.attend(one.id, layer, query, scale), want, bound, f"attend of sequence {number}, layer {layer}")

    def counted(self) -> None:
        """The numbers of free blocks and of allocated ones, if they are provided."""
        least, most = self.free, self.most_free
        with suppress(NotOffered):
            what, got = f"free blocks with {len(self.live)} sequences", self.cache.num_free_blocks
            if least == most:
                assert_equal(got, least, what)
            assert_true(least <= got <= most, what, f"a number in [{least}, {most + 1})", got)
            total = self.config["num_blocks"]
            assert_within(self.cache.utilization, 1 - got / total, 2.0**-22, f"utilization with {got} of {total} blocks free")

    def owned(self) -> None:
        """The tables, if they are provided: which of them list the same blocks, and how many blocks no table lists."""
        with suppress(NotOffered):
            listed = self._listed()
            for block, places in listed.items():
                assert_true(block < self.config["num_blocks"], "an id in a table", f"in [0, {self.config['num_blocks']})", block)
                if len(places) > 1:
                    self._shares(block, places)
            free = self.config["num_blocks"] - len(listed)
            assert_equal(self.cache.num_free_blocks, free, f"free blocks, where tables list {len(listed)}")

    def _listed(self) -> dict[int, list[tuple[int, int, int]]]:
        """The table entries by block: the number of the sequence, the layer and the entry. Raises NotOffered."""
        listed = dict[int, list[tuple[int, int, int]]]()
        for layer in self.layers:
            tables = np.asarray(self.cache.block_tables([one.id for one in self.live.values()], layer))
            for table, (number, one) in zip(tables, self.live.items(), strict=True):
                first, last = one.released // self.size, one.least
                missing = [entry for entry in range(first, last) if entry >= len(table) or table[entry] == NO_BLOCK]
                assert_true(not missing, f"block table of sequence {number}, layer {layer}", f"{last} blocks", missing[:1])
                for entry, block in enumerate(table.tolist()):
                    if block != NO_BLOCK:
                        listed.setdefault(block, []).append((number, layer, entry))
        return listed

    def _shares(self, block: int, places: list[tuple[int, int, int]]) -> None:
        """Raises ClauseViolation unless the sequences that list a block have the same tokens in it, and are forks."""
        for place in places[1:]:
            content = [self._entry(*each, place) for each in (places[0], place)]
            what = f"layer, entry and tokens of block {block}, in sequences {places[0][0]} and {place[0]}"
            assert_equal(content[1], content[0], what)
            assert_true(self.may_share(places[0][0], place[0]), what, "one sequence only", [places[0][0], place[0]])

    def may_share(self, number: int, other: int) -> bool:
        return number != other and self.live[number].forked and self.live[other].forked

    def _entry(self, number: int, layer: int, entry: int, beside: tuple[int, int, int]) -> list[int]:
        """Returns the layer, the entry, and the places of its tokens, as many as the entry `beside` has too."""
        stop = min((entry + 1) * self.size, self.live[number].lengths[layer], self.live[beside[0]].lengths[layer])
        streams, places = self.live[number].content.at(range(entry * self.size, max(stop, entry * self.size)))
        return [layer, entry, *streams.tolist(), *places.tolist()]

    def mapped(self, number: int) -> None:
        """The slots of a sequence in its last layer, if slots and tables are provided."""
        with suppress(NotOffered):
            one, layer = self.live[number], self.layers[-1]
            where = range(one.released, one.lengths[layer])
            table = [int(block) for block in self.cache.block_table(one.id, layer)]
            slots = [int(slot) for slot in self.cache.slot_mapping(one.id, layer, where.start, len(where))]
            want = [table[position // self.size] * self.size + position % self.size for position in where]
            assert_equal(slots, want, f"slots of sequence {number}, layer {layer}")

    def _content(self, one: SoakSequence, layer: int, positions: Sequence[int]) -> tuple[NDArray, NDArray]:
        return one.content.pair(layer % len(self.layers), positions, self.written.heads, self.written.dim)

    def _belongs(self, got: Any, one: SoakSequence, layer: int, positions: Sequence[int]) -> None:
        streams, places = one.content.at(positions)
        assert_content(got, streams, layer, places, self.written)


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
                self.admit(event)
        elif not numbers:
            return 0
        elif event.kind == "step" and pages.fits(numbers):
            self._step(numbers)
        elif event.kind == "look":
            return self._look(numbers[0])
        elif event.kind == "drop":
            pages.drop(numbers[0])
            pages.counted()
        elif event.kind == "pressure":
            pages.refuse_step(numbers) if len(numbers) > 1 else pages.refuse(numbers[0])
        else:
            with suppress(NotOffered):
                self.edit(event)
        return 0

    def admit(self, event: WorkloadEvent) -> None:
        pages, number = self.pages, event.numbers[0]
        pages.create(number, SequenceContent.after_prefix(number, PREFIXES + event.prefix, event.shared))
        if number % 2:
            with suppress(NotOffered):
                pages.reserve(number, event.tokens)
        for start in range(0, event.tokens, CHUNK):
            pages.write(number, min(CHUNK, event.tokens - start))

    def _step(self, numbers: Sequence[int]) -> None:
        self.steps += 1
        try:
            self.pages.step(numbers, layer_by_layer=self.steps % 4 == 0)
        except NotOffered:
            self.pages.step(numbers, layer_by_layer=self.steps % 4 != 0)
        if self.steps % 16 == 0:
            self.pages.counted()
            self.pages.owned()

    def edit(self, event: WorkloadEvent) -> None:
        """Edits a sequence, if the edit is allowed in its state. Raises NotOffered."""
        pages, number = self.pages, event.numbers[0]
        one = pages.live[number]
        length, another = self.tokens(number), len(pages.live) < self.max_sequences and pages.allows_copy(number)
        if event.kind == "fork" and len(event.numbers) == 2 and another:
            pages.fork(number, event.numbers[1])
            pages.counted()
        elif event.kind == "truncate" and one.content.edits < MAX_EDITS:
            left = max(0, length - event.tokens)
            if left == 0 or left >= one.released:
                pages.truncate(number, left)
        elif event.kind == "remove" and not one.released and length > event.tokens and pages.allows_copy(number):
            pages.remove(number, (length - event.tokens) // 2, (length + event.tokens) // 2)
        elif event.kind == "release" and length > event.tokens:
            pages.release_before(number, length - event.tokens)
            pages.counted()
        elif event.kind == "move" and not one.released and 0 < length <= CHUNK and another:
            pages.move(number)
            pages.counted()

    def _look(self, number: int) -> int:
        """Compares a sequence in one of three ways, depending on its number, then slots and attention. Returns the tokens."""
        pages, one, length = self.pages, self.pages.live[number], self.tokens(number)
        compared = self._read(number)
        pages.mapped(number)
        if 0 < length - one.released <= CHUNK:
            with suppress(NotOffered):
                pages.attend(number, pages.layers[-1])
        return compared

    def _read(self, number: int) -> int:
        pages, one, length = self.pages, self.pages.live[number], self.tokens(number)
        with suppress(NotOffered):
            if number % 3 == 0 and not one.released:
                for layer in pages.layers:
                    pages.look_at_batch([number], layer)
                return length * len(pages.layers)
            if number % 3 == 1:
                positions = list(range(length - 1, one.released - 1, -3))
                for layer in pages.layers:
                    pages.look_at(number, layer, positions)
                return len(positions) * len(pages.layers)
        pages.look(number)
        return (length - one.released) * len(pages.layers)


def server(subject: Subject, heads: int, dim: int) -> PagedSoakDriver:
    """Returns a server with room for some dozens of requests, 130 megabytes of float32. The workload fills it."""
    return PagedSoakDriver(
        SoakPagedCache(subject, num_blocks=1024, block_size=16, num_layers=2, num_kv_heads=heads, head_dim=dim)
    )
