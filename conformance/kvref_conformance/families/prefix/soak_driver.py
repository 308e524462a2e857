"""A prefix cache that serves requests with shared prefixes. Their tokens and possible hits are known independently."""

from contextlib import suppress

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.paged.soak_driver import CHUNK, PagedSoakDriver, SoakPagedCache, SoakSequence
from kvref_conformance.families.prefix.fixture import has_token_hits
from kvref_conformance.soak.cache_workload import WorkloadEvent
from kvref_conformance.testlib.assertions import assert_equal, assert_true, raises
from kvref_conformance.testlib.tagged_content import PREFIXES, SequenceContent

APART = 2**24  # larger than any position, so that streams have different tokens


class SoakPrefixCache(SoakPagedCache):
    """Sequences that can share blocks. `free` is then a lower bound, and everything that fits by it does fit."""

    @property
    def unit(self) -> int:
        """The number of tokens of which each hit is a multiple."""
        return 1 if has_token_hits(self.subject) else self.size

    @property
    def most_free(self) -> int:
        """The largest possible number of free blocks, if all sequences share all of their blocks."""
        total: int = self.config["num_blocks"] - len(self.layers) * max(
            (each.least - each.released // self.size for each in self.live.values()), default=0
        )
        return total

    def tokens(self, content: SequenceContent, count: int) -> list[int]:
        """Returns the tokens of a request: they differ by position and stream."""
        streams, places = content.at(range(count))
        tokens: list[int] = (streams * APART + places).tolist()
        return tokens

    def begin(self, number: int, count: int, prefix: int, shared: int) -> None:
        """Begins a request of `count` tokens, and checks its hit."""
        content = SequenceContent.after_prefix(number, PREFIXES + prefix, shared)
        least, most = self._possible_hits(content, shared, count)
        tokens, found = self.tokens(content, count), None
        with suppress(NotOffered):
            found = self.cache.match(tokens) if number % 2 else None
        one = self._add(number, self.cache.begin(tokens), content)
        one.lengths = [self.cache.length(one.id, layer) for layer in self.layers]
        assert_equal(one.lengths, one.lengths[:1] * len(one.lengths), f"length of each layer of sequence {number} after begin")
        right = least <= one.lengths[0] <= most and one.lengths[0] % self.unit == 0
        says = f"a multiple of {self.unit}, at least {least} and at most {most}"
        assert_true(right, f"the hit of sequence {number}", says, one.lengths[0])
        if found is not None:
            assert_equal(one.lengths[0], found, f"the hit of sequence {number}, which match returned just before")
        one.shared = shared
        one.reserve(self.entries(count))

    def _possible_hits(self, content: SequenceContent, shared: int, count: int) -> tuple[int, int]:
        """Returns the least and the largest possible hit of a new request. Blocks of live sequences must be found."""
        prefix = content.runs[0].stream
        beside = [min(each.shared, each.committed) for each in self.live.values() if each.content.runs[0].stream == prefix]
        most = min(shared, count - 1) // self.unit * self.unit
        return min(most // self.size, max(beside, default=0) // self.size) * self.size, most

    def commit(self, number: int) -> None:
        """Commits every token that is written in all layers."""
        one = self.live[number]
        self.cache.commit(one.id, self.tokens(one.content, min(one.lengths)))
        if not one.released:
            one.committed = min(one.lengths)

    def _cut(self, one: SoakSequence, unchanged: int, lengths: list[int]) -> None:
        """An entry that is committed and then written is copied first, so that it needs one more block for a moment."""
        super()._cut(one, unchanged, lengths)
        one.blocks += 1

    def refuse(self, number: int) -> None:
        super().refuse(number)
        with suppress(NotOffered), raises("InUse"):
            self.cache.reset()

    def may_share(self, number: int, other: int) -> bool:
        return number != other


class PrefixSoakDriver(PagedSoakDriver):
    """Serves requests from `SoakPrefixCache`: prompts begin with their hit, and every full block is committed."""

    pages: SoakPrefixCache

    def run_event(self, event: WorkloadEvent) -> int:
        compared = super().run_event(event)
        if event.kind == "step":
            for number in event.numbers:
                if number in self.pages.live and self.tokens(number) % self.pages.size == 0:
                    self.pages.commit(number)
        return compared

    def admit(self, event: WorkloadEvent) -> None:
        number, pages = event.numbers[0], self.pages
        pages.begin(number, event.tokens, event.prefix, event.shared)
        for start in range(self.tokens(number), event.tokens, CHUNK):
            pages.write(number, min(CHUNK, event.tokens - start))
        pages.commit(number)


def server(subject: Subject, heads: int, dim: int) -> PrefixSoakDriver:
    """Returns a server with room for some dozens of requests, 130 megabytes of float32. The workload fills it."""
    return PrefixSoakDriver(
        SoakPrefixCache(subject, num_blocks=1024, block_size=16, num_layers=2, num_kv_heads=heads, head_dim=dim)
    )
