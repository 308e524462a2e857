"""A prefix cache that serves requests with shared prefixes. Their tokens and possible hits are known independently."""

from contextlib import suppress
from typing import Any

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.paged.soak_driver import CHUNK, PagedSoakDriver, SoakPagedCache, SoakSequence
from kvref_conformance.soak.cache_workload import WorkloadEvent
from kvref_conformance.testlib.assertions import assert_equal, assert_true
from kvref_conformance.testlib.tagged_content import PREFIXES

APART = 2**24  # larger than any position, so that streams have different tokens


class SoakPrefixCache(SoakPagedCache):
    """Sequences that can share blocks. `free` is then a lower bound, and everything that fits by it does fit."""

    def __init__(self, subject: Subject, **sizes: Any) -> None:
        super().__init__(subject, **sizes)
        self.committed: dict[int, int] = {}  # sequence -> its number of committed tokens

    def tokens(self, number: int, count: int) -> list[int]:
        """Returns the tokens of a request: they differ by position and stream."""
        streams = self.streams(number, range(count))
        return [int(stream) * APART + position for position, stream in enumerate(streams)]

    def begin(self, number: int, count: int, shared: tuple[int, int]) -> None:
        """Begins a request of `count` tokens, and checks its hit."""
        self.live[number] = SoakSequence(-1, [0 for _ in self.layers], shared=shared)
        try:
            id = self.cache.begin(self.tokens(number, count))
        finally:
            one = self.live.pop(number)
        assert_true(id not in {each.id for each in self.live.values()}, "the id of a new sequence", "an id not in use", id)
        hits = [self.cache.length(id, layer) for layer in self.layers]
        assert_equal(hits, hits[:1] * len(hits), f"length of each layer of sequence {number} after begin")
        least, most = self._found(shared, count)
        right = least <= hits[0] <= most and hits[0] % self.size == 0
        assert_true(
            right, f"the hit of sequence {number}", f"a multiple of {self.size}, at least {least} and at most {most}", hits[0]
        )
        one.id, one.lengths, one.blocks = id, hits, self.entries(count)
        self.live[number], self.committed[number] = one, 0

    def _found(self, shared: tuple[int, int], count: int) -> tuple[int, int]:
        """Returns the least and the largest possible hit of a new request. Blocks of live sequences must be found."""
        stream, length = shared
        beside = [min(self.live[number].shared[1], tokens) for number, tokens in self.committed.items()
                  if self.live[number].shared[0] == stream]  # fmt: skip
        blocks = (min(length, count - 1) // self.size, min([length, count - 1, max(beside, default=0)]) // self.size)
        return blocks[1] * self.size, blocks[0] * self.size

    def commit(self, number: int) -> None:
        """Commits every token that is written in all layers."""
        one = self.live[number]
        self.committed[number] = min(one.lengths)
        self.cache.commit(one.id, self.tokens(number, min(one.lengths)))

    def drop(self, number: int) -> None:
        super().drop(number)
        del self.committed[number]

    def counted(self) -> None:
        """Raises ClauseViolation unless the number of free blocks, if it and the tables are provided, is the number of
        unlisted blocks.
        """
        with suppress(NotOffered):
            held = {
                int(block)
                for one in self.live.values()
                for layer in self.layers
                for block in self.cache.block_table(one.id, layer)
            }
            assert_equal(
                self.cache.num_free_blocks, self.config["num_blocks"] - len(held), f"free blocks with {len(self.live)} sequences"
            )

    def _owned(self) -> None:
        """Raises ClauseViolation if two tables list a block for different tokens, layers or entries."""
        owners = dict[int, tuple[int, int, int]]()
        for number, one in self.live.items():
            for layer in self.layers:
                for entry, block in enumerate(self.cache.block_table(one.id, layer)):
                    stop = min((entry + 1) * self.size, one.lengths[layer])
                    stream = int(self.streams(number, [stop - 1])[0])
                    owner = owners.setdefault(int(block), (stream, layer, entry))
                    assert_true(
                        owner == (stream, layer, entry),
                        f"(stream, layer, entry) that lists block {block}",
                        f"{owner} only",
                        (stream, layer, entry),
                    )


class PrefixSoakDriver(PagedSoakDriver):
    """Serves requests from `SoakPrefixCache`: prompts begin with their hit, and every full block is committed."""

    pages: SoakPrefixCache

    def run_event(self, event: WorkloadEvent) -> int:
        if event.kind == "pressure":
            return 0  # the number of free blocks is not known exactly
        compared = super().run_event(event)
        if event.kind == "step":
            for number in event.numbers:
                if number in self.pages.live and self.tokens(number) % self.pages.size == 0:
                    self.pages.commit(number)
        return compared

    def _admit(self, event: WorkloadEvent) -> None:
        number, pages = event.numbers[0], self.pages
        pages.begin(number, event.tokens, (PREFIXES + event.prefix, event.shared))
        for start in range(self.tokens(number), event.tokens, CHUNK):
            pages.write(number, min(CHUNK, event.tokens - start))
        pages.commit(number)


def server(subject: Subject, heads: int, dim: int) -> PrefixSoakDriver:
    """Returns a server with room for some dozens of requests, half a gigabyte of float32."""
    return PrefixSoakDriver(
        SoakPrefixCache(subject, num_blocks=4096, block_size=16, num_layers=2, num_kv_heads=heads, head_dim=dim)
    )
