"""Adapter for engines without sessions: each request sends all tokens of a session as a prompt.

The adapter provides no operation that such an engine lacks: there is no fork, truncate or remove. Calls that would exceed the
context, and tokens outside the vocabulary, raise NotOffered, because tokens are sent only when some have to be generated.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from kvref.canary.hybrid import AnyCanary
from kvref.errors import PositionOutOfRange, SequenceNotFound, in_range
from kvref_conformance.exceptions import NotOffered


class WholePrompts(ABC):
    def __init__(self, canary: AnyCanary) -> None:
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
        self._session_tokens(session)
        del self._tokens[session]

    def length(self, session: int) -> int:
        return len(self._session_tokens(session))

    def extend(self, session: int, tokens: Sequence[int]) -> None:
        prompt = self._session_tokens(session)
        if not all(0 <= token < self.canary.vocabulary for token in tokens):
            raise NotOffered("tokens outside the vocabulary")
        self._check_room(prompt, len(tokens))
        prompt.extend(int(token) for token in tokens)

    def generate(self, session: int, count: int) -> list[int]:
        tokens = self._session_tokens(session, generates=True)
        if not in_range(count, None, PositionOutOfRange, "count"):
            return []
        self._check_room(tokens, count)
        (output,) = self.complete([tokens], count)
        tokens += output
        return output

    def step(self, sessions: Sequence[int]) -> list[int]:
        prompts = [self._session_tokens(session, generates=True) for session in sessions]
        for tokens in prompts:
            self._check_room(tokens, 1)
        output = [tokens[0] for tokens in self.complete(prompts, 1)] if prompts else []
        for tokens, token in zip(prompts, output, strict=True):
            tokens.append(token)
        return output

    def _check_room(self, tokens: Sequence[int], count: int) -> None:
        if len(tokens) + count > self.canary.context:
            raise NotOffered("more tokens than the context has room for")

    def _session_tokens(self, session: int, generates: bool = False) -> list[int]:
        if session not in self._tokens:
            raise SequenceNotFound(f"unknown session {session!r} (never opened, or already closed)")
        if generates and not self._tokens[session]:
            raise PositionOutOfRange(f"session {session}: expected at least one token, got none")
        return self._tokens[session]
