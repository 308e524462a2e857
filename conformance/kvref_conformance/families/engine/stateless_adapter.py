"""Adapter for engines without sessions: each request sends all tokens of a session as a prompt.

The adapter provides no operation that such an engine lacks: there is no fork, truncate or remove. Calls that would exceed the
context, and tokens outside the vocabulary, raise NotOffered, because tokens are sent only when some have to be generated.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvref.canary import Canary
from kvref.errors import PositionOutOfRange, SequenceNotFound, in_range
from kvref_conformance.outcome import NotOffered


class WholePrompts(ABC):
    def __init__(self, canary: Canary) -> None:
        self.canary = canary
        self._tokens: dict[int, list[int]] = {}
        self._opened = 0

    @abstractmethod
    def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Returns the `count` greedily generated tokens for each prompt. All prompts are served together."""

    def open(self) -> int:
        session, self._opened = self._opened, self._opened + 1
        self._tokens[session] = []
        return session

    def close(self, session: int) -> None:
        self._known(session)
        del self._tokens[session]

    def length(self, session: int) -> int:
        return len(self._known(session))

    def extend(self, session: int, tokens: Sequence[int]) -> None:
        told = self._known(session)
        if not all(0 <= token < self.canary.vocabulary for token in tokens):
            raise NotOffered("tokens outside the vocabulary")
        self._room(told, len(tokens))
        told.extend(int(token) for token in tokens)

    def generate(self, session: int, count: int) -> list[int]:
        told = self._known(session, speaks=True)
        if not in_range(count, None, PositionOutOfRange, "count"):
            return []
        self._room(told, count)
        (said,) = self.complete([told], count)
        told += said
        return said

    def step(self, sessions: Sequence[int]) -> list[int]:
        told = [self._known(session, speaks=True) for session in sessions]
        for tokens in told:
            self._room(tokens, 1)
        said = [tokens[0] for tokens in self.complete(told, 1)] if told else []
        for tokens, token in zip(told, said, strict=True):
            tokens.append(token)
        return said

    def _room(self, told: Sequence[int], count: int) -> None:
        if len(told) + count > self.canary.context:
            raise NotOffered("more tokens than the context has room for")

    def _known(self, session: int, speaks: bool = False) -> list[int]:
        if session not in self._tokens:
            raise SequenceNotFound(f"unknown session {session!r} (never opened, or already closed)")
        if speaks and not self._tokens[session]:
            raise PositionOutOfRange(f"session {session}: expected at least one token, got none")
        return self._tokens[session]
