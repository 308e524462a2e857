"""The tiered cache as a list of tokens. Each token has its dequantized rows, its tier and its format."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.expectations import exact_reads
from kvref_conformance.oracle.formats import FORMATS_IN_GROUPS, ROTATED_FORMATS
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.oracle.token_storage import expected_tokens, is_storable, restored_values

# tier, the setting that is its room, the setting that is its format
TIER_SETTINGS = (
    ("tail", "tail_length", "tail_dtype"),
    ("warm", "warm_length", "warm_format"),
    ("store", "max_tokens", "store_format"),
)


@dataclass
class StoredToken:
    position: int
    key: ExpectedReads  # [num_kv_heads, head_dim]: its dequantized row
    value: ExpectedReads
    tier: str
    format: str = ""  # its format in that tier


class TierModel:
    """`policy` has tail_length, tail_dtype, warm_length, warm_format, store_format and max_tokens."""

    def __init__(self, **policy: Any) -> None:
        self.policy = policy
        self.tokens: list[StoredToken] = []
        self.appended = 0
        self.moved_at = 0  # value of `appended` when a token was last migrated or evicted
        self._first_policy = dict(policy)
        self.history: list[tuple[NDArray, NDArray] | dict[str, Any]] = []  # appended tokens, and policy changes

    def append(self, keys: NDArray, values: NDArray) -> None:
        self.history.append((keys, values))
        for key, value in zip(keys, values, strict=True):
            self.tokens.append(StoredToken(self.appended, exact_reads(key), exact_reads(value), "new"))
            self.appended += 1
            self._settle()
            if len(self.tokens) > self.policy["max_tokens"]:
                self.tokens, self.moved_at = self.tokens[-self.policy["max_tokens"] :], self.appended

    def update_policy(self, **changes: Any) -> None:
        self.policy |= changes
        self.history.append(changes)
        self._settle()

    def replay_until(self, length: int) -> "TierModel":
        """The state if no token at or after this position had ever been appended: all other calls are replayed (EDIT-03)."""
        replayed = TierModel(**self._first_policy)
        for each in self.history:
            if isinstance(each, dict):
                replayed.update_policy(**each)
            elif replayed.appended < length:
                replayed.append(*(part[: length - replayed.appended] for part in each))
        return replayed

    def can_change_policy(self, **changes: Any) -> bool | None:
        """Whether all cached tokens could migrate under another policy. None if rounding decides (TIER-18)."""
        new = self.policy | changes
        parts = [(part.values[None], token.tier) for token in self.tokens for part in (token.key, token.value)]
        answers = {can_store(values, remaining_formats(new, tier)) for values, tier in parts}
        return True if answers <= {True} else False if False in answers and reaches_store(new) else None

    def read(self) -> tuple[ExpectedReads, ExpectedReads]:
        return _stack_tokens(token.key for token in self.tokens), _stack_tokens(token.value for token in self.tokens)

    def count(self, tier: str) -> int:
        return sum(token.tier == tier for token in self.tokens)

    def _settle(self) -> None:
        """Assign tiers, newest token first: a token keeps its tier if there is room, or else moves to the next. None moves up."""
        room = {tier: self.policy[length] for tier, length, _ in TIER_SETTINGS}
        formats = {tier: self.policy[format] for tier, _, format in TIER_SETTINGS}
        order, missing = list(room), [tier for tier, length in room.items() if length == 0]
        for token in reversed(self.tokens):
            first = 0 if token.tier == "new" else order.index(token.tier)
            # A new token passes through every existing tier in order, and each tier stores the result of the one before.
            for level in range(first, len(order)):
                tier = order[level]
                if tier in missing:
                    continue
                if token.tier != tier:
                    self.moved_at = self.moved_at if token.tier == "new" else self.appended
                    token.key, token.value = (_store_token(part, formats[tier]) for part in (token.key, token.value))
                    token.tier, token.format = tier, formats[tier]
                if room[tier] > 0:
                    room[tier] -= 1
                    break


def remaining_formats(policy: Mapping[str, Any], tier: str = "") -> list[str]:
    """The formats that a token passes through in all tiers after the given one, or in all tiers if none is given."""
    later = [name for name, _, _ in TIER_SETTINGS].index(tier) + 1 if tier else 0
    return [policy[format] for _, length, format in TIER_SETTINGS[later:] if policy[length]]


def reaches_store(policy: Mapping[str, Any]) -> bool:
    """Whether tokens can reach the store: none does if tail and warm tier have room for max_tokens."""
    return bool(policy["tail_length"] + policy["warm_length"] < policy["max_tokens"])


def _stack_tokens(tokens: Iterable[ExpectedReads]) -> ExpectedReads:
    values, slack = zip(*tokens, strict=True)
    return ExpectedReads(np.stack(values), np.stack(slack))


def _store_token(token: ExpectedReads, format: str) -> ExpectedReads:
    """The dequantized [num_kv_heads, head_dim] rows of a token after it is stored in a format."""
    values, slack = restored_values(token.values[None], token.slack[None], format)
    return ExpectedReads(values[0], slack[0])


def can_store(tokens: NDArray, formats: Iterable[str]) -> bool | None:
    """Whether the first format can store the tokens, and each later format the rows dequantized from the one before.

    Returns None if rounding decides.

    Rounding decides if the answer changes for tokens that are 1% larger or smaller, because scales may be rounded differently.
    Magnitudes below 3e4 can always be stored: no scale or zero exceeds the largest magnitude of its row, and the smallest range
    of any scale dtype is that of float16, 65504. A row with one float32 scale can store every token that TIER-13 accepts.
    """
    formats = list(formats)
    if np.abs(tokens).max(initial=0) < 3e4 or not any(format in (*FORMATS_IN_GROUPS, *ROTATED_FORMATS) for format in formats):
        return True
    answers = {_can_store(tokens.astype(np.float64) * factor, formats) for factor in (0.99, 1.0, 1.01)}
    return answers.pop() if len(answers) == 1 else None


@np.errstate(over="ignore", invalid="ignore")
def _can_store(tokens: NDArray, formats: list[str]) -> bool:
    rows = tokens.astype(np.float32)
    for format in formats if rows.size else ():
        if not (np.isfinite(rows).all() and is_storable(rows, format)):
            return False
        rows = expected_tokens(rows, format).values
    return bool(np.isfinite(rows).all())


def reads_by_age(rows: NDArray, policy: Mapping[str, Any]) -> ExpectedReads:
    """The dequantized tokens [n, num_kv_heads, head_dim] after all are appended under one policy: `TierModel` from ages alone.

    The newest tail_length tokens are in the tail, the next warm_length in the warm tier, the rest in the store. Each token has
    passed through every tier before its own.
    """
    values, slack = np.array(rows, np.float32), np.zeros(rows.shape)
    older = len(rows)  # number of tokens that are older than all tokens of the tiers before
    for _, length, format in TIER_SETTINGS:
        if policy[length] and older:
            before = slice(older)
            values[before], slack[before] = restored_values(values[before], slack[before], policy[format])
            older = max(0, older - policy[length])
    cached = slice(max(0, len(rows) - policy["max_tokens"]), None)
    return ExpectedReads(values[cached], slack[cached])
