"""The tiered cache as a list of tokens, each remembering what it reads as and where it is."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.oracle.formats import IN_GROUPS, ROTATED
from kvref_conformance.oracle.rows import Reads
from kvref_conformance.oracle.tokens import storable, stored_again, tokens_as

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

    def can_become(self, **changes: Any) -> bool | None:
        """Whether all that is held could move on under another policy; None where that is close (TIER-18)."""
        new = self.policy | changes
        found = {can_go(part.values[None], way(new, token.tier)) for token in self.tokens for part in (token.key, token.value)}
        return True if found <= {True} else False if False in found and all_reached(new) else None

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


def way(policy: Mapping[str, Any], behind: str = "") -> list[str]:
    """The formats that a token goes through from its tier on, or from the first."""
    tiers = (
        ("tail", "tail_length", "tail_dtype"),
        ("warm", "warm_length", "warm_format"),
        ("store", "max_tokens", "store_format"),
    )
    later = [name for name, _, _ in tiers].index(behind) + 1 if behind else 0
    return [policy[format] for _, length, format in tiers[later:] if policy[length]]


def all_reached(policy: Mapping[str, Any]) -> bool:
    """Whether a token may come into every tier of a policy: none goes to the store where there is room for all before it."""
    return bool(policy["tail_length"] + policy["warm_length"] < policy["max_tokens"])


def given(token: NDArray) -> Reads:
    return Reads(token, np.zeros(token.shape))


def stacked(tokens: Iterable[Reads]) -> Reads:
    values, slack = zip(*tokens, strict=True)
    return Reads(np.stack(values), np.stack(slack))


def through(token: Reads, format: str) -> Reads:
    """What [num_kv_heads, head_dim] reads as once stored in a format."""
    values, slack = stored_again(token.values[None], token.slack[None], format)
    return Reads(values[0], slack[0])


def can_go(tokens: NDArray, formats: Iterable[str]) -> bool | None:
    """Whether tokens can be stored in one format, and what they read as there in the next, and so on; None where it is close.

    Close is where tokens a hundredth larger or smaller could not, or could: how a scale is rounded decides there. No scale or
    zero is larger than the largest magnitude, and float16 has the least range of what they are stored in, 65504: half of that,
    and what it reads as, is stored anywhere. A row with one scale of float32 takes whatever TIER-13 takes.
    """
    formats = list(formats)
    if np.abs(tokens).max(initial=0) < 3e4 or not any(format in (*IN_GROUPS, *ROTATED) for format in formats):
        return True
    found = {_goes(tokens.astype(np.float64) * factor, formats) for factor in (0.99, 1.0, 1.01)}
    return found.pop() if len(found) == 1 else None


@np.errstate(over="ignore", invalid="ignore")
def _goes(tokens: NDArray, formats: list[str]) -> bool:
    rows = tokens.astype(np.float32)
    for format in formats if rows.size else ():
        if not (np.isfinite(rows).all() and storable(rows, format)):
            return False
        rows = tokens_as(rows, format).values
    return bool(np.isfinite(rows).all())


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
            values[before], slack[before] = stored_again(values[before], slack[before], policy[format])
            older = max(0, older - policy[tier])
    kept = slice(max(0, len(rows) - policy["max_tokens"]), None)
    return Reads(values[kept], slack[kept])
