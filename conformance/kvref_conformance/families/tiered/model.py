"""Expected replies of the tiered cache, computed from the list of tokens in `tiers`."""

from typing import Any, ClassVar

import numpy as np

from kvref_conformance.families.tiered.tier_model import TierModel, can_store, reaches_store, remaining_formats
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.attention import expect_attend
from kvref_conformance.oracle.expectations import (
    AcceptedOrError,
    ExactValue,
    Expectation,
    ExpectedArrays,
    ExpectedError,
    UnjudgedReply,
    all_finite,
    array_errors,
    finite_errors,
    range_errors,
    to_float32,
)
from kvref_conformance.oracle.formats import AFFINE_FORMATS, PLAIN_FORMATS, SCALED_FORMATS, SYMMETRIC_FORMATS, group_of
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.oracle.formats.small_floats import round_to
from kvref_conformance.oracle.reference_model import ReadCall
from kvref_conformance.oracle.saved_state import CLAUSE_BY_OBSERVATION, WholeCacheModel
from kvref_conformance.oracle.token_storage import token_bytes

STATISTICS = {"total_tokens": "TIER-06", "tail_tokens": "TIER-01", "warm_tokens": "TIER-14", "store_tokens": "TIER-02"}
TIERS = ("tail", "warm", "store")
TRUNCATIONS = {"truncate": "EDIT-01", "truncate, which it might have refused": "EDIT-06"}  # last call: clause to report
ALLOWED = {"tail_dtype": PLAIN_FORMATS, "warm_format": SCALED_FORMATS, "store_format": SCALED_FORMATS}


class Tiered(WholeCacheModel):
    family = "tiered"
    content_attributes = ("tiers", "unknown")
    clause_by_observation: ClassVar = {
        **CLAUSE_BY_OBSERVATION,
        ("append", "total_tokens"): "TIER-05", ("clear", "total_tokens"): "LAW-05", ("clear", "read"): "LAW-05",
        ("policy", "read"): "TIER-10", ("policy", "stats"): "TIER-10", ("policy", "tier_of"): "TIER-10",
        **{(op, seen): clause for op, clause in TRUNCATIONS.items() for seen in ("total_tokens", "stats", "read", "tier_of")},
        "total_tokens": "TIER-06", "stats": "TIER-08", "tier_of": "TIER-01",
    }  # fmt: skip

    def __init__(self, *, num_kv_heads: int, head_dim: int, migration_batch: int, **policy: Any) -> None:
        super().__init__()
        self.row, self.batch, self.policy = (num_kv_heads, head_dim), migration_batch, policy
        self.tiers = TierModel(**policy)
        self.last_append_evicted = False  # whether the last append evicted tokens
        self.unknown = False

    def observations(self) -> list[ReadCall]:
        positions = range(max(0, self.tiers.appended - len(self.tiers.tokens) - 1), self.tiers.appended + 1)
        ages: list[ReadCall] = [("tier_of", {"position": position}) for position in positions]
        return [("total_tokens", {}), ("stats", {}), ("read", {}), *ages]

    def total_tokens(self) -> Expectation:
        return ExactValue(self.clause_of("total_tokens"), value=len(self.tiers.tokens))

    def append(self, keys: Any, values: Any) -> Expectation:
        shape = (None, *self.row)
        rows = to_float32(keys), to_float32(values)
        rounded = [round_to(part, self.policy["tail_dtype"]) if self.policy["tail_length"] else part for part in rows]
        if wrong := array_errors((keys, shape), (values, shape)):
            return self.expect_error(wrong + finite_errors(*rounded))

        def change(ok: Any) -> None:
            self.last_append_evicted = len(self.tiers.tokens) + len(keys) > self.policy["max_tokens"]
            self.tiers.append(*rows)

        def accept_unknown(ok: Any) -> None:
            self.unknown = True
            self.tiers.append(*(np.zeros_like(part) for part in rows))

        if all_finite(*rows) and not all(map(_storable, rounded)):
            return self.expect_error([("NonFinite", "TIER-13")])
        if not all_finite(*rows) or any(np.abs(part).max(initial=0) >= 2.0**126 for part in rounded):
            return AcceptedOrError(
                "TIER-13", self.on_success("append", accept_unknown), on_error=lambda: self.note_unchanged("refused")
            )
        if not (storable := self._can_store(*rows)):
            if storable is False:
                return self.expect_error([("NonFinite", "TIER-18")])
            return AcceptedOrError(
                "TIER-18", self.on_success("append", accept_unknown), on_error=lambda: self.note_unchanged("refused")
            )
        return Expectation("LAW-04", self.on_success("append", change))

    def _can_store(self, keys: NDArray, values: NDArray) -> bool | None:
        """Whether every tier of the policy can store the tokens. None if the spec allows both accepting and rejecting them."""
        answers = {can_store(part, remaining_formats(self.policy)) for part in (keys, values)}
        return True if answers == {True} else False if False in answers and reaches_store(self.policy) else None

    def shape(self) -> Any:
        return self.row, self.batch, self.policy

    def is_empty(self) -> bool:
        return not self.tiers.tokens

    def read(self) -> Expectation:
        if self.unknown:
            return UnjudgedReply("LAW-14")
        parts = self._parts()

        def clause_at(index: tuple[int, ...], got: NDArray) -> str:
            if self.last_change != "append":
                return self.clause_of("read")
            if self._displaced(index[0], got):
                return "TIER-05" if self.last_append_evicted else "TIER-03"
            token = self.tiers.tokens[index[0]]
            return (
                "LAW-04"
                if token.tier == "tail"
                else "TIER-17"
                if token.format not in (*SYMMETRIC_FORMATS, *AFFINE_FORMATS)
                else "TIER-02"
            )

        clause = "TIER-05" if self.last_append_evicted else "TIER-03"
        return ExpectedArrays(clause, names=("keys", "values"), parts=parts, clause_at=clause_at)

    def _displaced(self, row: int, got: NDArray) -> bool:
        """Whether the row that was read is closer to another token than to the expected one."""
        tokens = self.tiers.tokens
        off = [min(float(np.abs(got[row] - part.values).max()) for part in (token.key, token.value)) for token in tokens]
        return min(off) < off[row]

    def _parts(self) -> tuple[ExpectedReads, ExpectedReads]:
        if not self.tiers.tokens:
            empty = ExpectedReads(np.zeros((0, *self.row), np.float32), np.zeros((0, *self.row)))
            return empty, empty
        return self.tiers.read()

    def tier_of(self, position: Any) -> Expectation:
        first = self.tiers.appended - len(self.tiers.tokens)
        wrong = range_errors(position, self.tiers.appended, "PositionOutOfRange")
        if not wrong and position < first:
            wrong = [("PositionOutOfRange", "TIER-07")]
        if wrong:
            return ExpectedError(wrong[0][1], kinds=("PositionOutOfRange",))
        return ExactValue(self.clause_of("tier_of"), value=self.tiers.tokens[position - first].tier)

    def stats(self) -> Expectation:
        want: dict[str, Any] = {f"{tier}_tokens": self.tiers.count(tier) for tier in TIERS}
        want["total_tokens"] = len(self.tiers.tokens)
        for tier in TIERS:
            formats = [token.format for token in self.tiers.tokens if token.tier == tier]
            want[f"{tier}_bytes"] = sum(2 * token_bytes(*self.row, format) for format in formats)
        stored = sum(want[f"{tier}_bytes"] for tier in TIERS)
        plain = 8 * self.row[0] * self.row[1] * len(self.tiers.tokens)
        want["compression_ratio"] = plain / stored if stored else 1.0
        named = self.last_change == "policy" or self.last_change in TRUNCATIONS
        clauses = {name: self.clause_of("stats") if named else clause for name, clause in STATISTICS.items()}
        return ExactValue(self.clause_of("stats"), value=want, clauses=clauses)

    def update_policy(self, **changes: Any) -> Expectation:
        new = self.policy | changes
        good = set(changes) <= set(self.policy) - {"max_tokens"} and all(
            new[name] in allowed for name, allowed in ALLOWED.items()
        )
        lengths = new["tail_length"], new["warm_length"]
        good = good and all(isinstance(each, int) and each >= 0 for each in lengths) and sum(lengths) <= new["max_tokens"]
        if not (good and all(self.row[1] % group_of(new[name]) == 0 for name in ("warm_format", "store_format"))):
            return self.expect_error([("ConfigError", "LAW-12")])

        def change(ok: Any) -> None:
            self.policy = new
            self.tiers.update_policy(**changes)

        def change_unknown(ok: Any) -> None:
            self.unknown = True
            change(ok)

        if self.unknown or (storable := self.tiers.can_change_policy(**changes)) is None:
            return AcceptedOrError(
                "TIER-18", self.on_success("policy", change_unknown), on_error=lambda: self.note_unchanged("refused")
            )
        if not storable:
            return self.expect_error([("NonFinite", "TIER-18")])
        return Expectation("TIER-10", self.on_success("policy", change))

    def truncate(self, length: Any) -> Expectation:
        if wrong := range_errors(length, self.tiers.appended + 1, "PositionOutOfRange", "EDIT-02"):
            return self.expect_error(wrong)

        def change(ok: Any) -> None:
            self.tiers = self.tiers.replay_until(length)

        if length >= self.tiers.moved_at:
            return Expectation("EDIT-02" if length == self.tiers.appended else "EDIT-06", self.on_success("truncate", change))
        then = self.on_success("truncate, which it might have refused", change)
        return AcceptedOrError("EDIT-06", then, kinds=("NotTruncatable",), on_error=lambda: self.note_unchanged("refused"))

    def clear(self) -> Expectation:
        def change(ok: Any) -> None:
            self.tiers, self.unknown = TierModel(**self.policy), False

        return Expectation("LAW-05", self.on_success("clear", change))

    def attend(self, query: Any, scale: float) -> Expectation:
        return UnjudgedReply("ATTN-10") if self.unknown else expect_attend("ATTN-10", query, *self._parts(), scale)


def _storable(tokens: NDArray) -> bool:
    """Whether every value, and the range of every token, is finite in float32."""
    exact = tokens.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return all_finite(tokens, exact.max(axis=(1, 2)) - exact.min(axis=(1, 2)))
