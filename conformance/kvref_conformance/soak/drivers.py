"""Servers on each kind of cache: a paged cache serves many requests at once, a stream one at a time."""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from kvref_conformance.calls.messages import error_kinds
from kvref_conformance.calls.operation_table import operations
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families import all_families
from kvref_conformance.soak.cache_workload import ROOM_ERRORS, SoakDriver, WorkloadEvent
from kvref_conformance.testlib.assertions import raises
from kvref_conformance.testlib.law_adapter import LawAdapter, assert_counters_within_bounds, overrides
from kvref_conformance.testlib.production_sizes import FilledStream
from kvref_conformance.testlib.tagged_content import PREFIXES, SequenceContent

MAX_TOKENS = 4096
MAX_ATTENDED = 512  # tokens of one query
ATTEND_LAYERS = {("query", "scale"): (), ("layer", "query", "scale"): (0,)}  # the arguments before the query


def soak_families() -> list[str]:
    """Return the families that a workload can run on: those with keys and values of the same width."""
    return [
        family.name for family in all_families().values()
        if family.part("soak_driver") or (family.law_adapter and overrides(family.law_adapter, "sizes_for"))
    ]  # fmt: skip


def room_errors(family: str) -> list[str]:
    """Return the errors that an append without room has to raise; none if the family evicts tokens, or enlarges its memory."""
    named: str = all_families()[family].interface.ERRORS.get("append", "")
    return [kind for kind in named.split() if kind in ROOM_ERRORS]


def make_driver(subject: Subject, family: str, heads: int, dim: int) -> SoakDriver:
    """Return the server for a family. Raises NotOffered."""
    record = all_families()[family]
    subject.factory(family)
    if (own := record.part("soak_driver")) is not None:
        made: SoakDriver = own.server(subject, heads, dim)
        return made
    return StreamDriver(record.law_adapter(subject), heads, dim)


class StreamDriver:
    """One request at a time, in a stream that is cleared between requests. Requests are never forked, and nothing is released."""

    max_sequences = 1

    def __init__(self, small: LawAdapter, heads: int, dim: int) -> None:
        sizes = small.sizes_for(MAX_TOKENS) | ({"num_layers": 1} if "num_layers" in small.config else {})
        self.one_call = small.subject.limits.limit(small.family, "tokens").largest is None  # whether no append is split
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
            self.filled.start_content(SequenceContent.after_prefix(event.numbers[0], PREFIXES + event.prefix, event.shared))
            for start in range(0, event.tokens, 512):  # a prompt is appended in chunks
                self.filled.append(min(512, event.tokens - start))
        elif list(event.numbers) != self.current:
            return 0
        elif event.kind == "step" and self.fits(event.numbers):
            self.filled.append(1)
        elif event.kind == "look":
            self._look()
            return self.filled.count
        elif event.kind == "drop":
            self.filled.clear()
            self.current = []
        elif event.kind in ("truncate", "move", "pressure"):
            with suppress(NotOffered):
                self._edit(event)
        return 0

    def _look(self) -> None:
        """Compare every token, the counters, and one query for all tokens."""
        filled, stream = self.filled, self.filled.stream
        filled.assert_content()
        with suppress(NotOffered):
            if overrides(type(stream), "counters"):
                assert_counters_within_bounds(stream.counters(filled.total_appended), "a request")
            arguments = operations(stream.family)["attend"].parameters if "attend" in operations(stream.family) else ()
            if arguments in ATTEND_LAYERS and 0 < filled.count <= MAX_ATTENDED:
                filled.assert_attention(*ATTEND_LAYERS[arguments])

    def _edit(self, event: WorkloadEvent) -> None:
        """Edit the stream. Raise NotOffered if its cache lacks the operation."""
        stream, count = self.filled.stream, self.filled.count
        if event.kind == "move" and overrides(type(stream), "load"):
            data = stream.save_unconverted()
            stream.clear()
            try:
                stream.load(data)
            except NotOffered:
                self.filled.start_content(SequenceContent(event.numbers[0]))
                raise
            stream.num_appended = count
        elif event.kind == "pressure" and room_errors(stream.family) and self.one_call:
            heads, dim = self.filled.written.heads, self.filled.written.dim
            tokens = np.zeros((self.filled.room - count + 1, heads, dim), np.float32)
            with raises(*room_errors(stream.family)):
                stream.append_arrays(stream.to_cache_layout(tokens), stream.to_cache_layout(tokens))
        elif event.kind == "truncate" and overrides(type(stream), "truncatable") and stream.config.get("num_layers", 1) == 1:
            try:
                self.filled.truncate(max(0, count - event.tokens))
            except Exception as error:  # tokens that have been encoded in groups cannot be truncated one by one
                if "NotTruncatable" not in error_kinds(error):
                    raise
