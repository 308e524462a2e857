"""The tiered cache as a list of tokens, each remembering what it reads as and where it is."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.oracle.formats import AFFINE
from kvref_conformance.oracle.rows import Reads, read_as

POLICY = ("tail_length", "tail_dtype", "warm_length", "warm_format", "store_format", "max_tokens")


@dataclass
class Token:
    position: int
    key: Reads  # [num_kv_heads, head_dim]: what it reads as now
    value: Reads
    tier: str
    format: str = ""  # in which it is stored there


class Tiers:
    """`policy` has tail_length, tail_dtype, warm_length, warm_format, store_format and max_tokens."""

    def __init__(self, **policy: Any) -> None:
        self.policy = policy
        self.tokens: list[Token] = []
        self.appended = 0
        self.moved_at = 0  # what that was when a token last went down a tier, or out
        self._begun = dict(policy)
        self.came: list[tuple[NDArray, NDArray] | dict[str, Any]] = []  # tokens that came together, or changes of the policy

    def append(self, keys: NDArray, values: NDArray) -> None:
        self.came.append((keys, values))
        for key, value in zip(keys, values, strict=True):
            self.tokens.append(Token(self.appended, given(key), given(value), "new"))
            self.appended += 1
            self._settle()
            if len(self.tokens) > self.policy["max_tokens"]:
                self.tokens, self.moved_at = self.tokens[-self.policy["max_tokens"] :], self.appended

    def update_policy(self, **changes: Any) -> None:
        self.policy |= changes
        self.came.append(changes)
        self._settle()

    def before(self, length: int) -> "Tiers":
        """What there would be had no token at this position, or past it, ever come: everything else again (EDIT-03)."""
        again = Tiers(**self._begun)
        for each in self.came:
            if isinstance(each, dict):
                again.update_policy(**each)
            elif again.appended < length:
                again.append(*(part[: length - again.appended] for part in each))
        return again

    def read(self) -> tuple[Reads, Reads]:
        return stacked(token.key for token in self.tokens), stacked(token.value for token in self.tokens)

    def count(self, tier: str) -> int:
        return sum(token.tier == tier for token in self.tokens)

    def _settle(self) -> None:
        """Let every token, newest first, stay where it is if there is room, and go down a tier if not. None goes up."""
        room = {"tail": self.policy["tail_length"], "warm": self.policy["warm_length"], "store": self.policy["max_tokens"]}
        formats = {
            "tail": self.policy["tail_dtype"],
            "warm": self.policy["warm_format"],
            "store": self.policy["store_format"],
        }
        order, missing = list(room), [tier for tier, length in room.items() if length == 0]
        for token in reversed(self.tokens):
            first = 0 if token.tier == "new" else order.index(token.tier)
            # A new token has to pass through every tier that exists, in order, losing what each takes from it.
            for level in range(first, len(order)):
                tier = order[level]
                if tier in missing:
                    continue
                if token.tier != tier:
                    self.moved_at = self.moved_at if token.tier == "new" else self.appended
                    token.key, token.value = (through(part, formats[tier]) for part in (token.key, token.value))
                    token.tier, token.format = tier, formats[tier]
                if room[tier] > 0:
                    room[tier] -= 1
                    break


def given(token: NDArray) -> Reads:
    return Reads(token, np.zeros(token.shape))


def stacked(tokens: Iterable[Reads]) -> Reads:
    values, slack = zip(*tokens, strict=True)
    return Reads(np.stack(values), np.stack(slack))


def through(token: Reads, format: str) -> Reads:
    """What [num_kv_heads, head_dim] reads as once stored in a format: affine formats share a scale over the whole token.

    Slack d from an earlier tier moves the row by d and its scale by no more, which three times d covers.
    """
    rows = token.values.reshape(1, -1) if format in AFFINE else token.values
    stored = read_as(rows, format)
    shape = token.values.shape
    return Reads(stored.values.reshape(shape), stored.slack.reshape(shape) + 3 * token.slack.max())


def settled(rows: NDArray, policy: Mapping[str, Any]) -> Reads:
    """What tokens [n, num_kv_heads, head_dim] read as once all are appended under one policy: `Tiers` by ages alone.

    The newest tail_length tokens lie in the tail, the next warm_length in the warm tier, the rest in the store. Each has gone
    through every tier on its way.
    """
    values, slack = np.array(rows, np.float32), np.zeros(rows.shape)
    older = len(rows)  # than those that lie in the tiers before
    for tier, format in (("tail_length", "tail_dtype"), ("warm_length", "warm_format"), ("max_tokens", "store_format")):
        if policy[tier] and older:
            before = slice(older)
            flat = values[before].reshape(older, -1) if policy[format] in AFFINE else values[before]
            stored = read_as(flat, policy[format])
            values[before] = stored.values.reshape(values[before].shape)
            slack[before] = stored.slack.reshape(values[before].shape) + 3 * slack[before].max(axis=(1, 2), keepdims=True)
            older = max(0, older - policy[tier])
    kept = slice(max(0, len(rows) - policy["max_tokens"]), None)
    return Reads(values[kept], slack[kept])
