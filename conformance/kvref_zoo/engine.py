"""Wrong engines."""

import kvref.engine
from kvref.canary import Canary
from kvref.errors import PositionOutOfRange
from kvref_zoo.mutant import mutant


@mutant("ENG-09", also="ENG-10", seen_in="ml-explore/mlx-lm#1109")
class EngineRollsBackTheLengthOnly(kvref.engine.Engine):
    """`truncate` shortens the list of tokens and leaves the cache as it is.

    The next tokens are appended after the removed ones.
    """

    def __init__(self, canary: Canary, cache_tokens: int) -> None:
        super().__init__(canary, cache_tokens)
        self.cache.commit = lambda sequence, tokens: None  # type: ignore[method-assign]  # this engine has no prefix cache

    def _held(self, session: int) -> int:
        return min(super()._held(session), self.length(session))

    def truncate(self, session: int, length: int) -> None:
        if not 0 <= length <= self.length(session):
            raise PositionOutOfRange(f"length: expected an integer in [0, {self.length(session) + 1}), got {length}")
        del self._tokens[session][length:]
