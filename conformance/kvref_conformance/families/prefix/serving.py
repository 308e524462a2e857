"""A cache that finds prefixes and serves requests that begin alike: what each holds, and what it may have found."""

from contextlib import suppress
from typing import Any

from kvref_conformance.checking.content import PREFIXES
from kvref_conformance.checking.expect import equal, true
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.paged.serving import CHUNK, PagedServer, Pages, Sequenced
from kvref_conformance.outcome import NotOffered
from kvref_conformance.soak.workload import Event

APART = 2**24  # more tokens than a stream has: no token of one stream is another's


class PrefixPages(Pages):
    """Blocks may be shared, so that more are free than the sum of what sequences hold says: what fits by it does fit."""

    def __init__(self, subject: Subject, **sizes: Any) -> None:
        super().__init__(subject, **sizes)
        self.committed: dict[int, int] = {}  # by sequence, its tokens that can be found

    def tokens(self, number: int, count: int) -> list[int]:
        """What a request says: of another place or stream another token."""
        streams = self.streams(number, range(count))
        return [int(stream) * APART + position for position, stream in enumerate(streams)]

    def begin(self, number: int, count: int, shared: tuple[int, int]) -> None:
        """A request of so many tokens: what is found of them is not written again."""
        self.live[number] = Sequenced(-1, [0 for _ in self.layers], shared=shared)
        try:
            id = self.cache.begin(self.tokens(number, count))
        finally:
            one = self.live.pop(number)
        true(id not in {each.id for each in self.live.values()}, "the id of a new sequence", "one that no other has", id)
        hits = [self.cache.length(id, layer) for layer in self.layers]
        equal(hits, hits[:1] * len(hits), f"tokens found in each layer of sequence {number}")
        least, most = self._found(shared, count)
        right = least <= hits[0] <= most and hits[0] % self.size == 0
        true(right, f"tokens found of sequence {number}", f"{least} to {most}, in blocks of {self.size}", hits[0])
        one.id, one.lengths, one.blocks = id, hits, self.entries(count)
        self.live[number], self.committed[number] = one, 0

    def _found(self, shared: tuple[int, int], count: int) -> tuple[int, int]:
        """How many tokens of a new request must be found, for a sequence that lives has them, and how many may be."""
        stream, length = shared
        beside = [min(self.live[number].shared[1], tokens) for number, tokens in self.committed.items()
                  if self.live[number].shared[0] == stream]  # fmt: skip
        blocks = (min(length, count - 1) // self.size, min([length, count - 1, max(beside, default=0)]) // self.size)
        return blocks[1] * self.size, blocks[0] * self.size

    def commit(self, number: int) -> None:
        """Every token that is written in all layers."""
        one = self.live[number]
        self.committed[number] = min(one.lengths)
        self.cache.commit(one.id, self.tokens(number, min(one.lengths)))

    def drop(self, number: int) -> None:
        super().drop(number)
        del self.committed[number]

    def counted(self) -> None:
        """As many blocks are free as no table of a sequence lists, where that can be seen."""
        with suppress(NotOffered):
            held = {
                int(block)
                for one in self.live.values()
                for layer in self.layers
                for block in self.cache.block_table(one.id, layer)
            }
            equal(
                self.cache.num_free_blocks, self.config["num_blocks"] - len(held), f"free blocks, of {len(self.live)} sequences"
            )

    def _owned(self) -> None:
        """Two tables list a block for the same tokens at the same place alone."""
        owners = dict[int, tuple[int, int, int]]()
        for number, one in self.live.items():
            for layer in self.layers:
                for entry, block in enumerate(self.cache.block_table(one.id, layer)):
                    stop = min((entry + 1) * self.size, one.lengths[layer])
                    stream = int(self.streams(number, [stop - 1])[0])
                    owner = owners.setdefault(int(block), (stream, layer, entry))
                    true(owner == (stream, layer, entry), f"what lies in block {block}", f"{owner} alone", (stream, layer, entry))


class PrefixServer(PagedServer):
    """Prompts are begun on what is found of them, and committed; so is every block that an output fills."""

    pages: PrefixPages

    def do(self, event: Event) -> int:
        if event.kind == "pressure":
            return 0  # how much fits is not known to the block
        compared = super().do(event)
        if event.kind == "step":
            for number in event.numbers:
                if number in self.pages.live and self.tokens(number) % self.pages.size == 0:
                    self.pages.commit(number)
        return compared

    def _admit(self, event: Event) -> None:
        number, pages = event.numbers[0], self.pages
        pages.begin(number, event.tokens, (PREFIXES + event.prefix, event.shared))
        for start in range(self.tokens(number), event.tokens, CHUNK):
            pages.write(number, min(CHUNK, event.tokens - start))
        pages.commit(number)


def server(subject: Subject, heads: int, dim: int) -> PrefixServer:
    """With room for some dozens of requests, half a gigabyte of float32."""
    return PrefixServer(PrefixPages(subject, num_blocks=4096, block_size=16, num_layers=2, num_kv_heads=heads, head_dim=dim))
