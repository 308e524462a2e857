"""The two-tier cache as a list of tokens, each remembering what it reads as and where it is."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvref_conformance.oracle.rows import AFFINE, read_as


@dataclass
class Token:
    position: int
    key: Any  # float32 [num_kv_heads, head_dim]: what it reads as now
    value: Any
    tier: str


class Tiers:
    """`policy` has tail_length, tail_dtype, warm_length, warm_format, store_format and max_tokens."""

    def __init__(self, **policy: Any) -> None:
        self.policy = policy
        self.tokens: list[Token] = []
        self.appended = 0

    def append(self, keys: Any, values: Any) -> None:
        for key, value in zip(keys, values, strict=True):
            self.tokens.append(Token(self.appended, key, value, "new"))
            self.appended += 1
            self._settle()
            del self.tokens[: -self.policy["max_tokens"]]

    def update_policy(self, **changes: Any) -> None:
        self.policy |= changes
        self._settle()

    def read(self) -> tuple[Any, Any]:
        return np.stack([token.key for token in self.tokens]), np.stack([token.value for token in self.tokens])

    def count(self, tier: str) -> int:
        return sum(token.tier == tier for token in self.tokens)

    def _settle(self) -> None:
        """Let every token, newest first, stay where it is if there is room, and go down a tier if not. None goes up."""
        room = {"hot": self.policy["tail_length"], "warm": self.policy["warm_length"], "cold": self.policy["max_tokens"]}
        formats = {
            "hot": self.policy["tail_dtype"],
            "warm": self.policy["warm_format"],
            "cold": self.policy["store_format"],
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
                    token.key, token.value = (through(part, formats[tier]) for part in (token.key, token.value))
                    token.tier = tier
                if room[tier] > 0:
                    room[tier] -= 1
                    break


def through(token: Any, format: str) -> Any:
    """What [num_kv_heads, head_dim] reads as once stored in a format: affine formats share a scale over the whole token."""
    rows = token.reshape(1, -1) if format in AFFINE else token
    return read_as(rows, format).reshape(token.shape)
