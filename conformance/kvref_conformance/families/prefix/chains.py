"""Helpers of the prefix model: invalid tokens, the order of blocks, and the expected hit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvref_conformance.conversation.exchange import show
from kvref_conformance.families.paged.stored import Token
from kvref_conformance.families.prefix.kept import Key
from kvref_conformance.oracle.expected import Choice, Wrong, not_in_range
from kvref_conformance.outcome import Broken

MOST_TOKEN = 2**63


@dataclass(frozen=True)
class Hit(Choice):
    """An expected number of tokens. clause_of: returns the clause that a wrong number breaks."""

    clause_of: Callable[[Any], str] = lambda got: ""

    def look(self, ok: Any, op: str, level: Any) -> None:
        if not self.accepts(ok):
            raise Broken(op, self.says, show(ok), self.clause_of(ok))


def follows(key: Key, other: Key) -> bool:
    return key[0] == other[0] and len(key[1]) > len(other[1]) and key[1][: len(other[1])] == other[1]


def no_tokens(tokens: Sequence[Any]) -> Wrong:
    return [wrong for token in tokens for wrong in not_in_range(token, MOST_TOKEN, "TokenOutOfRange", "PREFIX-15")]


def same(one: list[list[Token]], other: list[list[Token]]) -> bool:
    """Returns whether tokens read back as the same bits in every layer."""
    pairs = (pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True))
    return all(
        np.array_equal(x.values.view(np.uint32), y.values.view(np.uint32)) for (a, b) in pairs for x, y in zip(a, b, strict=True)
    )
