"""The reference model of the family `pruned`: one list of tokens per head."""

from typing import Any, ClassVar, NamedTuple

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.expectations import (
    AcceptedOrError,
    Errors,
    ExactValue,
    Expectation,
    ExpectedArrays,
    UnjudgedReply,
    all_finite,
    array_errors,
    count_tokens,
    exact_reads,
    finite_errors,
    range_errors,
    to_float32,
)
from kvref_conformance.oracle.reference_model import ReadCall, ReferenceModel


class Token(NamedTuple):
    """A stored token of one head."""

    position: int
    key: NDArray
    value: NDArray


class Pruned(ReferenceModel):
    family = "pruned"
    clause_by_observation: ClassVar = {
        **{("clear", seen): "PRUNED-09" for seen in ("length", "stored_tokens", "read", "positions")},
        **{("truncate", seen): "PRUNED-08" for seen in ("length", "stored_tokens", "read", "positions")},
        **{("prune", seen): "PRUNED-02" for seen in ("stored_tokens", "read", "positions")},
        ("prune", "length"): "PRUNED-04",
        ("append", "positions"): "PRUNED-04",
        "length": "PRUNED-01", "stored_tokens": "PRUNED-01", "read": "PRUNED-01", "positions": "PRUNED-01",
    }  # fmt: skip

    def __init__(self, *, num_kv_heads: int, head_dim: int, max_tokens: int) -> None:
        super().__init__()
        self.row, self.most = (num_kv_heads, head_dim), max_tokens
        self.heads: list[list[Token]] = [[] for _ in range(num_kv_heads)]
        self.end = 0

    @property
    def stored(self) -> int:
        return len(self.heads[0])

    def observations(self) -> list[ReadCall]:
        return [
            ("length", {}),
            ("stored_tokens", {}),
            ("read", {}),
            *(("positions", {"head": head}) for head in range(self.row[0])),
        ]

    def length(self) -> Expectation:
        return ExactValue(self.clause_of("length"), value=self.end)

    def stored_tokens(self) -> Expectation:
        return ExactValue(self.clause_of("stored_tokens"), value=self.stored)

    def append(self, keys: Any, values: Any) -> Expectation:
        given = (keys, (None, *self.row)), (values, (None, *self.row))
        wrong = array_errors(*given)
        if self.stored + count_tokens(*given) > self.most:
            wrong.append(("CapacityExceeded", "PRUNED-06"))
        if wrong:
            return self.expect_error(wrong + finite_errors(keys, values))

        def change(ok: Any) -> None:
            for key_rows, value_rows in zip(to_float32(keys), to_float32(values), strict=True):
                for head, tokens in enumerate(self.heads):
                    tokens.append(Token(self.end, key_rows[head], value_rows[head]))
                self.end += 1

        then = self.on_success("append", change)
        return Expectation("PRUNED-06", then) if all_finite(keys, values) else AcceptedOrError("PRUNED-06", then)

    def prune(self, scores: Any, keep: Any, sinks: Any = 0, recent: Any = 0) -> Expectation:
        wrong: Errors = [(kind, "PRUNED-07") for kind, _ in array_errors((scores, (self.row[0], self.stored)))]
        wrong += [("NonFinite", "PRUNED-07")] if not wrong and not all_finite(scores) else []
        ranges = [range_errors(each, None, "PositionOutOfRange", "PRUNED-07") for each in (keep, sinks, recent)]
        wrong += [each for found in ranges for each in found[:1]][:1]
        if not any(ranges) and keep < max(1, sinks + recent):
            wrong.append(("PositionOutOfRange", "PRUNED-07"))
        if wrong:
            return self.expect_error(wrong)
        given = to_float32(scores)

        def change(ok: Any) -> None:
            if self.stored > keep:
                self.heads = [
                    _kept(tokens, row, keep, sinks, recent) for tokens, row in zip(self.heads, given.tolist(), strict=True)
                ]

        return Expectation("PRUNED-02", self.on_success("prune", change))

    def truncate(self, length: Any) -> Expectation:
        if wrong := range_errors(length, self.end + 1, "PositionOutOfRange", "PRUNED-08"):
            return self.expect_error(wrong)
        removed = set(range(length, self.end))
        if any(removed - {token.position for token in tokens} for tokens in self.heads):
            return self.expect_error([("NotTruncatable", "PRUNED-08")])

        def change(ok: Any) -> None:
            self.heads = [[token for token in tokens if token.position < length] for tokens in self.heads]
            self.end = length

        return Expectation("PRUNED-08", self.on_success("truncate", change))

    def clear(self) -> Expectation:
        def change(ok: Any) -> None:
            self.heads, self.end = [[] for _ in self.heads], 0

        return Expectation("PRUNED-09", self.on_success("clear", change))

    def read(self) -> Expectation:
        keys, values = (self.rows(part) for part in ("key", "value"))
        parts = exact_reads(keys), exact_reads(values)
        return ExpectedArrays(self.clause_of("read"), names=("keys", "values"), parts=parts)

    def rows(self, part: str) -> NDArray:
        """Returns the keys or values: [stored_tokens, num_kv_heads, head_dim]."""
        by_head = [[getattr(token, part) for token in tokens] for tokens in self.heads]
        return np.array(by_head, np.float32).reshape(self.row[0], self.stored, self.row[1]).swapaxes(0, 1)

    def positions(self, head: Any) -> Expectation:
        if wrong := range_errors(head, self.row[0], "HeadOutOfRange", "PRUNED-01"):
            return self.expect_error(wrong)
        return ExactValue(self.clause_of("positions"), value=[token.position for token in self.heads[head]])

    def attend(self, query: Any, scale: Any = None, causal: Any = False) -> Expectation:
        return UnjudgedReply("PRUNED-05")


def _kept(tokens: list[Token], scores: list[float], keep: int, sinks: int, recent: int) -> list[Token]:
    """Returns the tokens of a head that stay, one after another: the definition of PRUNED-02."""
    chosen = {*range(sinks), *range(len(tokens) - recent, len(tokens))}
    while len(chosen) < keep:
        others = [row for row in range(len(tokens)) if row not in chosen]
        best = max(scores[row] for row in others)
        chosen.add(next(row for row in others if scores[row] == best))
    return [tokens[row] for row in sorted(chosen)]
