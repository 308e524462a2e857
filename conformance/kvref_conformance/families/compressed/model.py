"""The reference model of the family `compressed`: per sequence a list of tokens, each with three rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.attention import U, attention, may_overflow, query_errors
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
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.oracle.offloadable_sequences import OffloadableSequences
from kvref_conformance.oracle.reference_model import ReadCall
from kvref_conformance.oracle.rotary import expected_rotation, full_frequencies

SEEN = ("length", "read_window", "read_rows", "read_state")
THETA = 160_000.0
MOST_CHANGE = 1.0  # twice the change of a score, caused by the slack of rows, from which an output is not compared


class Token(NamedTuple):
    """The rows of a token, [head_dim] each."""

    latent: NDArray
    contribution: NDArray
    gates: NDArray


@dataclass
class CompressedSequence:
    """floor: the smallest length, 0 aside, to which `truncate` must work (f of COMPR-05)."""

    tokens: list[Token]
    floor: int


class Compressed(OffloadableSequences):
    family = "compressed"
    sequence_clause, copy_clause = "COMPR-06", "COMPR-07"
    clause_by_observation: ClassVar = {
        **{("truncate", seen): "COMPR-05" for seen in SEEN},
        **{(did, seen): "COMPR-06" for did in ("create", "fork", "drop") for seen in SEEN},
        **{(did, seen): "COMPR-07" for did in ("offload", "restore", "discard") for seen in SEEN},
        **dict.fromkeys(SEEN, "COMPR-01"),
        "num_free_blocks": "COMPR-08",
    }

    def __init__(
        self, *, num_blocks: int, head_dim: int, rope_dim: int, window: int, ratio: int, max_tokens: int, rollback: int
    ) -> None:
        super().__init__()
        self.blocks, self.dim, self.rope, self.window, self.ratio = num_blocks, head_dim, rope_dim, window, ratio
        self.most, self.rollback = max_tokens, rollback
        self.sequences: dict[int, CompressedSequence]

    def observations(self) -> list[ReadCall]:
        found: list[ReadCall] = [("num_free_blocks", {})]
        for sequence in self.sequences:
            found += [(name, {"sequence": sequence}) for name in SEEN]
        return found

    def num_free_blocks(self) -> Expectation:
        return ExactValue(self.clause_of("num_free_blocks"), value=self.blocks - len(self.sequences))

    # Sequences and copies.

    def open(self, clause: str, name: str, tokens: list[Token]) -> Expectation:
        if len(self.sequences) >= self.blocks:
            return self.expect_error([("OutOfBlocks", "COMPR-08")])

        def change(id: int) -> None:
            self.sequences[id] = CompressedSequence(list(tokens), len(tokens))

        return self.new_id(clause, name, change)

    def create(self) -> Expectation:
        return self.open("COMPR-06", "create", [])

    def fork(self, sequence: Any) -> Expectation:
        if wrong := self.unknown(sequence):
            full = len(self.sequences) >= self.blocks
            return self.expect_error(wrong + ([("OutOfBlocks", "COMPR-08")] if full else []))
        return self.open("COMPR-06", "fork", self.sequences[sequence].tokens)

    def restore(self, handle: Any) -> Expectation:
        if wrong := self.unknown_handle(handle):
            full = len(self.sequences) >= self.blocks
            return self.expect_error(wrong + ([("OutOfBlocks", "COMPR-08")] if full else []))
        return self.open("COMPR-07", "restore", self.copies[handle])

    # Tokens.

    def append(self, sequence: Any, latents: Any, contributions: Any, gates: Any) -> Expectation:
        found = self._accept("append", sequence, latents, contributions, gates)
        if isinstance(found, Expectation):
            return found
        if all_finite(*map(np.asarray, (latents, contributions, gates))):
            return Expectation("COMPR-01", found[1])
        return AcceptedOrError("COMPR-01", found[1], on_error=lambda: self.note_unchanged("refused"))

    def _accept(
        self, name: str, sequence: Any, *arrays: Any, more: Errors | None = None
    ) -> "Expectation | tuple[list[Token], Callable[[Any], None]]":
        """The expected error, or the new tokens and what a success does."""
        given = [(array, (None, self.dim)) for array in arrays]
        wrong = self.unknown(sequence) + [
            (kind, "COMPR-01" if kind == "ShapeMismatch" else clause) for kind, clause in array_errors(*given)
        ]
        wrong += more or []
        length = 0 if self.unknown(sequence) else len(self.sequences[sequence].tokens)
        if length + count_tokens(*given) > self.most:
            wrong.append(("CapacityExceeded", "COMPR-08"))
        if wrong:
            return self.expect_error(wrong + finite_errors(*arrays))
        new = [Token(*rows) for rows in zip(*map(to_float32, arrays), strict=True)]

        def change(ok: Any) -> None:
            state = self.sequences[sequence]
            state.tokens.extend(new)
            state.floor = max(state.floor, len(state.tokens) - self.rollback)

        return new, self.on_success(name, change)

    def step(
        self, sequence: Any, query: Any, latents: Any, contributions: Any, gates: Any, scale: float | None = None
    ) -> Expectation:
        more: Errors = [(kind, "COMPR-03") for kind, _ in query_errors(query, 1, self.dim)]
        if not more and np.ndim(latents) == 2 and len(query) != len(latents):
            more.append(("ShapeMismatch", "COMPR-03"))
        found = self._accept("step", sequence, latents, contributions, gates, more=more)
        if isinstance(found, Expectation):
            return found
        new, then = found
        old = self.sequences[sequence].tokens
        tokens = [*old, *new]
        everything = np.array(tokens, np.float32).reshape(-1, 3, self.dim)
        if not all_finite(query, everything):
            return AcceptedOrError("COMPR-03", then, on_error=lambda: self.note_unchanged("refused"))
        rows = self.rows(tokens)
        entries = np.concatenate([everything[:, 0], rows.values])[:, None, :].astype(np.float64)
        slack = np.concatenate([np.zeros((len(tokens), self.dim)), rows.slack])[:, None, :]
        scale = self.dim**-0.5 if scale is None else scale
        if may_overflow(query, entries, entries, scale) or not np.isfinite(slack).all():
            return UnjudgedReply("COMPR-03", then)
        views = []
        for at in range(len(old), len(tokens)):
            window = range(max(0, at - self.window + 1), at + 1)
            complete = [len(tokens) + group for group in range(len(rows.values)) if (group + 1) * self.ratio - 1 <= at]
            views.append(np.array([*window, *complete], np.int64))
        out, bound = attention(query, entries, entries, scale=scale, views=views)
        growth, spread = self._spread(np.asarray(query, np.float64), entries, slack, scale, views)
        bound = growth * (bound + 2 * spread) + U * np.abs(out)
        return ExpectedArrays(
            "COMPR-03", then, parts=(ExpectedReads(out.astype(np.float32), bound),), always_slack=True,
            undetermined=growth >= np.exp(MOST_CHANGE),
        )  # fmt: skip

    def _spread(
        self, query: NDArray, entries: NDArray, slack: NDArray, scale: float, views: list[NDArray]
    ) -> tuple[NDArray, NDArray]:
        """By how much the output changes if each number of an entry changes by at most its slack: a factor, and a difference.

        A score changes by at most d = |scale| sum(|q| slack), so that a weight is multiplied by a factor in [e^-2d, e^2d]. The
        exact output changes by at most spread = (e^2d - 1) times the largest magnitude of a value, plus the largest slack of a
        value. The bound of ATTN-04 is a relative error r times the weighted mean of the magnitudes. With the changed entries,
        this mean is at most e^2d times (mean + slack), and r grows by less than d / 2, because it counts roundings of scores.
        While r is less than 1/2, the bound therefore grows to at most e^2d (bound + spread), and the whole error is at most
        e^2d (bound + 2 spread).
        """
        growth, spread = np.ones_like(query), np.zeros_like(query)
        for row, view in enumerate(views):
            values, errors = np.abs(entries[view, 0]), slack[view, 0]
            for head in range(query.shape[1]):
                change = min(2 * abs(scale) * float((errors @ np.abs(query[row, head])).max()), MOST_CHANGE)
                growth[row, head] = np.exp(change)
                spread[row, head] = np.expm1(change) * (values + errors).max(axis=0) + errors.max(axis=0)
        return growth, spread

    def truncate(self, sequence: Any, length: Any) -> Expectation:
        wrong = self.unknown(sequence)
        stop = None if wrong else len(self.sequences[sequence].tokens) + 1
        if wrong := wrong + range_errors(length, stop, "PositionOutOfRange", "COMPR-05"):
            return self.expect_error(wrong)
        state = self.sequences[sequence]

        def change(ok: Any) -> None:
            del state.tokens[length:]
            state.floor = min(state.floor, length)

        then = self.on_success("truncate", change)
        if length == 0 or length >= state.floor:
            return Expectation("COMPR-05", then)
        return AcceptedOrError("COMPR-05", then, kinds=("NotTruncatable",), on_error=lambda: self.note_unchanged("refused"))

    def read_window(self, sequence: Any) -> Expectation:
        if wrong := self.unknown(sequence):
            return self.expect_error(wrong)
        tokens = self.sequences[sequence].tokens
        kept = tokens[max(0, len(tokens) - self.window + 1) :]
        return ExpectedArrays(self.clause_of("read_window"), parts=(exact_reads(self._stack(kept, 0)),))

    def read_state(self, sequence: Any) -> Expectation:
        if wrong := self.unknown(sequence):
            return self.expect_error(wrong)
        tokens = self.sequences[sequence].tokens
        kept = tokens[len(tokens) // self.ratio * self.ratio :]
        parts = tuple(exact_reads(self._stack(kept, part)) for part in (1, 2))
        return ExpectedArrays(self.clause_of("read_state"), names=("contributions", "gates"), parts=parts)

    def read_rows(self, sequence: Any) -> Expectation:
        if wrong := self.unknown(sequence):
            return self.expect_error(wrong)
        clause, rows = self.clause_of("read_rows"), self.rows(self.sequences[sequence].tokens)
        return ExpectedArrays(
            "COMPR-02" if clause == "COMPR-01" else clause, parts=(rows,), always_slack=True, undetermined=np.isinf(rows.slack)
        )

    def _stack(self, tokens: list[Token], part: int) -> NDArray:
        return np.array([token[part] for token in tokens], np.float32).reshape(-1, self.dim)

    def rows(self, tokens: list[Token]) -> ExpectedReads:
        """The rows of the complete groups, with their bounds. A group with a number that is not finite has an infinite bound."""
        values = np.zeros((len(tokens) // self.ratio, self.dim), np.float32)
        slack = np.zeros(values.shape)
        plain = self.dim - self.rope
        for group in range(len(values)):
            members = tokens[group * self.ratio : (group + 1) * self.ratio]
            parts, gates = (self._stack(members, part)[:, :, None] for part in (1, 2))
            query = np.ones((1, self.dim, 1))
            if not all_finite(parts, gates) or may_overflow(query, gates, parts, 1.0):
                slack[group] = np.inf
                continue
            out, bound = attention(query, gates, parts, scale=1.0)
            mean = ExpectedReads(out[0, :, 0].astype(np.float32), bound[0, :, 0] + U * np.abs(out[0, :, 0]))
            values[group], slack[group] = mean.values, mean.slack
            if self.rope:
                rotated = ExpectedReads(mean.values[plain:], mean.slack[plain:])
                frequencies = full_frequencies(self.rope, THETA)
                turned = expected_rotation(rotated, group * self.ratio, frequencies, "pairs", "float32")
                values[group, plain:], slack[group, plain:] = turned.values, turned.slack
        return ExpectedReads(values, slack)
