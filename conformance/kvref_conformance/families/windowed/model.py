"""The reference model of the windowed cache: a list of all appended tokens, and which of them must still be readable."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from kvref_conformance.calls.messages import CallReply
from kvref_conformance.implementation_api import Level, NDArray
from kvref_conformance.oracle.attention import expect_attend, query_errors, visible_positions
from kvref_conformance.oracle.expectations import (
    AcceptedOrError,
    AnyOf,
    ExactValue,
    Expectation,
    ExpectedArrays,
    ExpectedError,
    UnjudgedReply,
    all_finite,
    array_errors,
    exact_reads,
    finite_errors,
    range_errors,
    to_float32,
)
from kvref_conformance.oracle.formats import PLAIN_FORMATS
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.oracle.reference_model import ReadCall
from kvref_conformance.oracle.saved_state import CLAUSE_BY_OBSERVATION, WholeCacheModel
from kvref_conformance.oracle.token_storage import expected_tokens, is_storable

Token = tuple[ExpectedReads, ExpectedReads]  # key and value as `read` has to return them, each [num_kv_heads, head_dim]


@dataclass(frozen=True)
class ArraysOrRefused(ExpectedArrays):
    """Accepts the correct arrays, or an error of one of these kinds."""

    kinds: tuple[str, ...] = ()

    def judge(self, reply: CallReply, op: str, level: Level) -> None:
        if not (reply.error and reply.error.kind in self.kinds):
            super().judge(reply, op, level)

    def describe(self) -> str:
        return " or ".join([*self.kinds, "no error"])

    def to_json(self) -> dict[str, Any]:
        return {"error": {"kinds": list(self.kinds)}, "any": True}


class Windowed(WholeCacheModel):
    family = "windowed"
    content_attributes = ("tokens", "first_needed", "longest", "truncated_last")
    largest = ("longest",)
    clause_by_observation: ClassVar = {
        **CLAUSE_BY_OBSERVATION,
        ("clear", "length"): "LAW-05", ("clear", "read"): "LAW-05", ("clear", "stored_tokens"): "LAW-05",
        **{("truncate", seen): "WIN-06" for seen in ("length", "read", "stored_tokens")},
        "length": "WIN-03", "stored_tokens": "WIN-04", "read": "WIN-03",
    }  # fmt: skip

    def __init__(
        self, *, num_kv_heads: int, head_dim: int, window: int, sinks: int, chunk: int, rollback: int, dtype: str
    ) -> None:
        super().__init__()
        self.row, self.dtype = (num_kv_heads, head_dim), dtype
        self.window, self.sinks, self.chunk, self.rollback = window, sinks, chunk, rollback
        self.tokens: list[Token] = []
        self.unknown = False  # a token was accepted that the format cannot hold; no clause defines how it reads
        self.first_needed = 0  # from this position on every token has to be stored: a later query may see it
        self.longest = 0  # tokens of the longest append or step
        self.last_count = 0  # tokens of the last append or step
        self.truncated_last = False  # truncated, and no token appended since

    def seen(self, query: int) -> NDArray:
        return visible_positions(query, self.window, self.sinks, self.chunk)

    def needed(self) -> list[int]:
        """Returns the positions that the next query sees, other than its own."""
        return [int(at) for at in self.seen(len(self.tokens)) if at < len(self.tokens)]

    def observations(self) -> list[ReadCall]:
        return [("length", {}), ("stored_tokens", {}), ("read", {"positions": self.needed()})]

    def length(self) -> Expectation:
        return ExactValue(self.clause_of("length"), value=len(self.tokens))

    def stored_tokens(self) -> Expectation:
        least, most = len(self.needed()), self.window + self.sinks + self.rollback + self.longest
        return AnyOf(
            self.clause_of("stored_tokens"), range_text=f"{least} to {most}: window, sinks, rollback and the longest step",
            accepts=lambda ok: isinstance(ok, int) and least <= ok <= most,
        )  # fmt: skip

    def append(self, keys: Any, values: Any) -> Expectation:
        shape = (None, *self.row)
        if wrong := array_errors((keys, shape), (values, shape)):
            return self.expect_error(wrong + finite_errors(keys, values))
        then = self.on_success("append", lambda ok: self._append(keys, values))
        if self._can_store(keys, values):
            return Expectation("WIN-05", then)
        return AcceptedOrError("WIN-05", then, on_error=self._refused)

    def step(self, query: Any, keys: Any, values: Any, scale: float) -> Expectation:
        shape = (None, *self.row)
        wrong = array_errors((keys, shape), (values, shape))
        wrong += query_errors(query, *self.row)
        if not wrong and len(query) != len(keys):
            wrong = [("ShapeMismatch", "LAW-10")]
        if wrong:
            return self.expect_error(wrong + finite_errors(query, keys, values))
        then = self.on_success("step", lambda ok: self._append(keys, values))
        if not self._can_store(keys, values):
            return AcceptedOrError(self._clause(len(keys)), then, on_error=self._refused)
        at = range(len(self.tokens), len(self.tokens) + len(keys))
        tokens = [*self.tokens, *self.as_tokens(keys, values)]
        return self._attended(self._clause(len(keys)), query, tokens, [self.seen(each) for each in at], scale, then)

    def shape(self) -> Any:
        return self.row, self.dtype, self.window, self.sinks, self.chunk, self.rollback

    def is_empty(self) -> bool:
        return not self.tokens

    def attend(self, query: Any, scale: float) -> Expectation:
        views = [self.seen(len(self.tokens) - 1)] * len(query)
        found = self._attended(self._clause(1), query, self.tokens, views, scale, lambda ok: None)
        if not (self.truncated_last and self.first_needed):
            return found
        evicted = ("PositionOutOfRange",)  # the newest token may see an evicted one that the next token does not
        if isinstance(found, ExpectedArrays):
            return ArraysOrRefused("WIN-06", parts=found.parts, always_slack=True, kinds=evicted)
        return (
            replace(found, kinds=found.kinds + evicted)
            if isinstance(found, ExpectedError)
            else AcceptedOrError("WIN-06", kinds=evicted)
        )

    def _attended(
        self, clause: str, query: Any, tokens: list[Token], views: Sequence[NDArray], scale: float, then: Any
    ) -> Expectation:
        keys, values = self.stack(tokens)
        found = expect_attend(clause, query, keys, values, scale, views)

        def clause_at(index: tuple[int, ...], got: NDArray) -> str:
            unseen = np.delete(np.arange(len(tokens)), views[index[0]])
            # Not quiet: NaN, infinite, or so large that the scores may overflow.
            quiet = all(np.abs(part.values[unseen]).max(initial=0) < 1e30 for part in (keys, values))
            return "ATTN-07" if np.isnan(got[index]) and not quiet else clause

        if isinstance(found, ExpectedArrays):
            if self.unknown:
                return UnjudgedReply(clause, then)
            return ExpectedArrays(clause, then, parts=found.parts, always_slack=True, clause_at=clause_at)
        return UnjudgedReply(clause, then) if isinstance(found, UnjudgedReply) else found

    def _clause(self, count: int) -> str:
        """Returns the clause that the attention of `count` queries is judged by."""
        if self.chunk:
            return "WIN-07"
        if self.last_change == "truncate":
            return "WIN-06"
        return "WIN-02" if count > 1 else "WIN-05" if self.sinks and len(self.tokens) > self.window else "WIN-01"

    def read(self, positions: Any) -> Expectation:
        for position in positions:
            if wrong := range_errors(position, len(self.tokens), "PositionOutOfRange"):
                return ExpectedError(wrong[0][1], kinds=("PositionOutOfRange",))
        if self.unknown:
            return (
                UnjudgedReply("LAW-14")
                if {*positions} <= {*self.needed()}
                else AcceptedOrError("LAW-14", kinds=("PositionOutOfRange",))
            )
        parts = self.stack([self.tokens[position] for position in positions])
        if not {*positions} <= {*self.needed()}:
            return ArraysOrRefused("WIN-03", names=("keys", "values"), parts=parts, kinds=("PositionOutOfRange",))

        def clause_at(index: tuple[int, ...], got: NDArray) -> str:
            position = positions[index[0]]
            if self.dtype not in PLAIN_FORMATS and not self._another(got[index[0]]):
                return "WIN-10"
            if self.last_change in ("append", "step") and position >= len(self.tokens) - self.last_count:
                return "LAW-04"
            return "WIN-05" if position < self.sinks and self.last_change != "truncate" else self.clause_of("read")

        return ExpectedArrays(self.clause_of("read"), names=("keys", "values"), parts=parts, clause_at=clause_at)

    def _another(self, got: NDArray) -> bool:
        """Returns whether `got` is a row of some token: then a whole row was read from the wrong place."""
        return any(np.array_equal(got, part.values) for token in self.tokens for part in token)

    def truncate(self, length: Any) -> Expectation:
        if wrong := range_errors(length, len(self.tokens) + 1, "PositionOutOfRange", "EDIT-02"):
            return self.expect_error(wrong)

        def change(ok: Any) -> None:
            del self.tokens[length:]
            self.first_needed = min(self.first_needed, self._first(length))
            self.truncated_last = True

        then = self.on_success("truncate", change)
        if length == len(self.tokens) or self._first(length) >= self.first_needed:
            return Expectation("WIN-06", then)
        return AcceptedOrError("WIN-06", then, kinds=("NotTruncatable",), on_error=self._refused)

    def clear(self) -> Expectation:
        def change(ok: Any) -> None:
            self.tokens, self.first_needed, self.truncated_last, self.unknown = [], 0, False, False

        return Expectation("LAW-05", self.on_success("clear", change))

    def _first(self, query: int) -> int:
        """Returns the first position after the sinks that the query at position `query` sees."""
        return min((int(at) for at in self.seen(query) if at >= self.sinks), default=query)

    def _can_store(self, keys: Any, values: Any) -> bool:
        """Returns whether every value is finite, and also finite when it is read back in the format."""
        return all_finite(keys, values) and all(is_storable(to_float32(part), self.dtype) for part in (keys, values))

    def _append(self, keys: Any, values: Any) -> None:
        self.unknown = self.unknown or not (self.dtype in PLAIN_FORMATS or self._can_store(keys, values))
        self.tokens += self.as_tokens(keys, values)
        self.last_count, self.longest = len(keys), max(self.longest, len(keys))
        self.first_needed = max(self.first_needed, self._first(max(0, len(self.tokens) - self.rollback)))
        self.truncated_last = self.truncated_last and not len(keys)

    def as_tokens(self, keys: Any, values: Any) -> list[Token]:
        stored = [expected_tokens(to_float32(part), self.dtype) for part in (keys, values)]
        return list(zip(*([ExpectedReads(*each) for each in zip(*part, strict=True)] for part in stored), strict=True))

    def stack(self, tokens: list[Token]) -> tuple[ExpectedReads, ExpectedReads]:
        return self._stack_part([token[0] for token in tokens]), self._stack_part([token[1] for token in tokens])

    def _stack_part(self, parts: list[ExpectedReads]) -> ExpectedReads:
        values = np.array([part.values for part in parts], np.float32).reshape(-1, *self.row)
        if self.dtype in PLAIN_FORMATS:
            return exact_reads(values)
        return ExpectedReads(values, np.array([part.slack for part in parts], np.float64).reshape(-1, *self.row))

    def _refused(self) -> None:
        self.note_unchanged("refused")
