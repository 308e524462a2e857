"""`truncate` shortens the list of tokens and leaves the cache as it is: the next tokens are appended after the removed ones."""

from typing import Any

import kvref.engine
from kvref.canary import Canary, sized
from kvref.errors import PositionOutOfRange
from kvref_zoo.right import Right


class Engine(kvref.engine.Engine):
    def __init__(self, canary: Canary, cache_tokens: int) -> None:
        super().__init__(canary, cache_tokens)
        self.cache.commit = lambda sequence, tokens: None  # type: ignore[method-assign]  # this engine has no prefix cache

    def _held(self, session: int) -> int:
        return min(super()._held(session), self.length(session))

    def truncate(self, session: int, length: int) -> None:
        if not 0 <= length <= self.length(session):
            raise PositionOutOfRange(f"length: expected an integer in [0, {self.length(session) + 1}), got {length}")
        del self._tokens[session][length:]


class Implementation(Right):
    clause = "ENG-09"
    also = ("ENG-10",)
    bug = "ml-explore/mlx-lm#1109"

    def engine(self, cache_tokens: int, **sizes: Any) -> Engine:
        return Engine(sized(**sizes), cache_tokens)
