"""Servers on each kind of cache: a paged cache serves many requests at once, a stream one at a time."""

from collections.abc import Sequence

from kvref_conformance.calls.subject import Subject
from kvref_conformance.families import all_families
from kvref_conformance.soak.cache_workload import SoakDriver, WorkloadEvent
from kvref_conformance.testlib.law_adapter import LawAdapter, overrides
from kvref_conformance.testlib.production_sizes import FilledStream
from kvref_conformance.testlib.tagged_content import PREFIXES

MAX_TOKENS = 4096


def soak_families() -> list[str]:
    """Return the families that a workload can run on: those with keys and values of the same width."""
    return [
        family.name for family in all_families().values()
        if family.part("soak_driver") or (family.law_adapter and overrides(family.law_adapter, "sizes_for"))
    ]  # fmt: skip


def make_driver(subject: Subject, family: str, heads: int, dim: int) -> SoakDriver:
    """Return the server for a family. Raises NotOffered."""
    record = all_families()[family]
    subject.factory(family)
    if (own := record.part("soak_driver")) is not None:
        made: SoakDriver = own.server(subject, heads, dim)
        return made
    return StreamDriver(record.law_adapter(subject), heads, dim)


class StreamDriver:
    """One request at a time, in a stream that is cleared between requests."""

    max_sequences = 1

    def __init__(self, small: LawAdapter, heads: int, dim: int) -> None:
        sizes = small.sizes_for(MAX_TOKENS)
        self.filled = FilledStream(small.new_cache(**sizes, num_kv_heads=heads, head_dim=dim))
        self.max_tokens = self.filled.room
        self.current: list[int] = []

    def running_requests(self) -> Sequence[int]:
        return self.current

    def fits(self, numbers: Sequence[int], tokens: int = 1) -> bool:
        return self.filled.count + tokens <= self.max_tokens

    def allows_length(self, tokens: int) -> bool:
        return tokens <= self.max_tokens

    def tokens(self, number: int) -> int:
        return self.filled.count

    def run_event(self, event: WorkloadEvent) -> int:
        """Return how many tokens were compared."""
        if event.kind == "admit" and not self.current:
            self.current = list(event.numbers)
            self.filled.start_content(event.numbers[0], (PREFIXES + event.prefix, event.shared))
            for start in range(0, event.tokens, 512):  # a prompt is appended in chunks
                self.filled.append(min(512, event.tokens - start))
        elif list(event.numbers) != self.current:
            return 0
        elif event.kind == "step" and self.fits(event.numbers):
            self.filled.append(1)
        elif event.kind == "look":
            self.filled.assert_content()
            return self.filled.count
        elif event.kind == "drop":
            self.filled.clear()
            self.current = []
        return 0
