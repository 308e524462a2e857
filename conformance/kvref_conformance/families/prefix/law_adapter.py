"""The law adapter of the prefix cache: a paged stream whose sequences begin with a new token."""

from itertools import count
from typing import Any

from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.paged.law_adapter import PagedLawAdapter
from kvref_conformance.testlib.law_adapter import BadCall, unknown_ids


class PrefixLawAdapter(PagedLawAdapter):
    family = "prefix"

    def __init__(self, subject: Subject, **changes: Any) -> None:
        self.unseen = count(1)  # shared by all streams of the cache
        super().__init__(subject, **changes)

    def begun(self) -> int:
        return int(self.cache.begin([next(self.unseen)]))

    def out_of_range_calls(self) -> list[BadCall]:
        calls = super().out_of_range_calls()
        calls += [("PositionOutOfRange", "commit", (self.sequence, [1] * (self.length() + 1)))]
        calls += [("SequenceNotFound", "commit", (other, [])) for other in unknown_ids(self.subject, self.sequence)]
        calls += [("TokenOutOfRange", "commit", (self.sequence, [-1])), ("OutOfBlocks", "begin", ([1] * (self.room() + 1),))]
        return calls + [("TokenOutOfRange", name, ([1, -1],)) for name in ("begin", "match")]
