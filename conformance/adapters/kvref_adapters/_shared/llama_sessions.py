"""Sessions over the C API of llama.cpp, or of a fork: each session is a sequence of one cache.

`truncate`, and the rollback after a failed call, remove positions from the cache. The logits after the remaining tokens are then
not available, so the last remaining token is decoded again before the next token is generated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvref.canary.hybrid import AnyCanary
from kvref.errors import CapacityExceeded, OutOfBlocks, PositionOutOfRange, SequenceNotFound, TokenOutOfRange, in_range
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import NDArray

DONE, NO_SLOT, ABORTED = 0, 1, 2  # return values of `decode`


class BatchRow(NamedTuple):
    """One token of a batch. speaks: compute the logits after it."""

    token: int
    position: int
    sequence: int
    speaks: bool


class Context(Protocol):
    """A context of llama.cpp. Methods have the names of llama.h."""

    def decode(self, rows: Sequence[BatchRow]) -> int: ...
    def decode_aborted(self, rows: Sequence[BatchRow]) -> int: ...
    def logits(self, row: int, vocabulary: int) -> NDArray: ...
    def seq_rm(self, sequence: int, start: int, stop: int) -> None: ...
    def try_seq_rm(self, sequence: int, start: int, stop: int) -> bool: ...
    def seq_cp(self, source: int, target: int) -> None: ...
    def seq_add(self, sequence: int, start: int, delta: int) -> None: ...
    def seq_get(self, sequence: int) -> bytes: ...
    def seq_set(self, sequence: int, data: bytes) -> bool: ...


@dataclass
class LlamaCppSession:
    """One session.

    sequence: its sequence id, None if it has no tokens in the cache. cached: the number of its tokens in the cache. next: the
    most likely next token, None if it has to be computed.
    """

    tokens: list[int] = field(default_factory=list)
    sequence: int | None = None
    cached: int = 0
    next: int | None = None

    def missing(self, more: Sequence[int]) -> list[BatchRow]:
        """Return the session's tokens and `more` that are not cached, as rows of a batch; only the last row requests logits."""
        assert self.sequence is not None
        tokens = [*self.tokens, *more]
        return [BatchRow(tokens[at], at, self.sequence, at == len(tokens) - 1) for at in range(self.cached, len(tokens))]


class LlamaCppEngine:
    def __init__(self, canary: AnyCanary, context: Context, sequences: int) -> None:
        self._vocabulary, self._length, self._context = canary.vocabulary, canary.context, context
        self._free = list(range(sequences))
        self._sessions: dict[int, LlamaCppSession] = {}
        self._saved: dict[int, tuple[LlamaCppSession, bytes]] = {}
        self._opened = 0

    def open(self) -> int:
        return self._begin(LlamaCppSession())

    def close(self, session: int) -> None:
        self._forget(self._known(session), 0)
        del self._sessions[session]

    def length(self, session: int) -> int:
        return len(self._known(session).tokens)

    def extend(self, session: int, tokens: Sequence[int]) -> None:
        told = self._known(session)
        given = [in_range(token, self._vocabulary, TokenOutOfRange, "token") for token in tokens]
        self._room(told, len(given))
        if given:
            self._tell([told], [given])

    def generate(self, session: int, count: int) -> list[int]:
        told = self._speaking(session)
        start = len(told.tokens)
        count = min(in_range(count, None, PositionOutOfRange, "count"), self._length - start)
        try:
            for _ in range(count):
                self._say([told])
        except OutOfBlocks:
            self._cut(told, start)
            raise
        return told.tokens[start:]

    def step(self, sessions: Sequence[int]) -> list[int]:
        told = [self._speaking(session) for session in sessions]
        for each in told:
            self._room(each, 1)
        return self._say(told) if told else []

    def sample(self, session: int, n: int, count: int) -> list[int]:
        """Generate from n forks of the session, all in one batch."""
        told = self._speaking(session)
        self._room(told, in_range(count, None, PositionOutOfRange, "count"))
        forks = list[int]()
        try:
            for _ in range(in_range(n, None, PositionOutOfRange, "n")):
                forks.append(self.fork(session))
            for _ in range(count):
                self.step(forks)
            return [token for fork in forks for token in self._sessions[fork].tokens[len(told.tokens) :]]
        finally:
            for fork in forks:
                self.close(fork)

    def cancel(self, session: int, count: int) -> None:
        """Generate half of the tokens, then abort the computation of the next one."""
        told = self._speaking(session)
        self._room(told, in_range(count, None, PositionOutOfRange, "count"))
        start = len(told.tokens)
        try:
            for _ in range(count // 2):
                self._say([told])
            if count:
                answer = self._context.decode_aborted(told.missing(self._ready([told])))
                if answer not in (ABORTED, NO_SLOT):
                    raise RuntimeError(f"llama_decode returned {answer} although it was aborted")
        finally:
            self._cut(told, start)

    def fork(self, session: int) -> int:
        told = self._known(session)
        child = LlamaCppSession(list(told.tokens), None, told.cached, told.next)
        if told.sequence is not None:
            child.sequence = self._taken()
            self._context.seq_cp(told.sequence, child.sequence)
        return self._begin(child)

    def truncate(self, session: int, length: int) -> None:
        told = self._known(session)
        self._cut(told, in_range(length, len(told.tokens) + 1, PositionOutOfRange, "length"))

    def remove(self, session: int, start: int, stop: int) -> None:
        raise NotOffered("removal that equals a fresh prefill: llama.cpp moves the later entries and does not recompute them")

    def shift(self, session: int, start: int, stop: int) -> None:
        """Context shift: remove positions [start, stop), move later entries down, and re-rotate their keys.

        The cache must have at least one entry after `stop`.
        """
        told = self._known(session)
        assert told.sequence is not None and 0 <= start < stop < told.cached
        self._context.seq_rm(told.sequence, start, stop)
        self._context.seq_add(told.sequence, stop, start - stop)
        del told.tokens[start:stop]
        told.cached -= stop - start
        told.next = None

    def save(self, session: int) -> int:
        told = self._known(session)
        number = len(self._saved)
        data = b"" if told.sequence is None else self._context.seq_get(told.sequence)
        self._saved[number] = LlamaCppSession(list(told.tokens), None, told.cached, told.next), data
        return number

    def load(self, saved: int) -> int:
        if saved not in self._saved:
            raise SequenceNotFound(f"saved: expected a value returned by `save`, got {saved!r}")
        kept, data = self._saved[saved]
        told = LlamaCppSession(list(kept.tokens), None, kept.cached, kept.next)
        if data:
            told.sequence = self._taken()
            if not self._context.seq_set(told.sequence, data):
                self._forget(told, 0)
                raise OutOfBlocks(f"load: the cache has no room for {len(told.tokens)} tokens")
        return self._begin(told)

    def _begin(self, told: LlamaCppSession) -> int:
        session, self._opened = self._opened, self._opened + 1
        self._sessions[session] = told
        return session

    def _say(self, told: Sequence[LlamaCppSession]) -> list[int]:
        """Generate one token in each session, or in none if an error is raised."""
        said = self._ready(told)
        self._tell(told, [[token] for token in said])
        return said

    def _ready(self, told: Sequence[LlamaCppSession]) -> list[int]:
        """Return the next token of each session. Where it is not known, the last token is decoded again."""
        for each in told:
            if each.next is None:
                self._forget(each, len(each.tokens) - 1)
                self._tell([each], [[]])
        return [each.next for each in told if each.next is not None]

    def _tell(self, told: Sequence[LlamaCppSession], given: Sequence[Sequence[int]]) -> None:
        """Decode new tokens of all sessions in one batch. If OutOfBlocks is raised, no session changes."""
        for each in told:
            if each.sequence is None:
                each.sequence = self._taken()
        rows = [each.missing(more) for each, more in zip(told, given, strict=True)]
        answer = self._context.decode([row for each in rows for row in each])
        if answer != DONE:
            for each in told:
                self._forget(each, each.cached)
            if answer == NO_SLOT:
                raise OutOfBlocks(f"llama_decode found no room for {sum(map(len, rows))} tokens")
            raise RuntimeError(f"llama_decode returned {answer}")
        spoke = -1
        for each, more, its in zip(told, given, rows, strict=True):
            spoke += len(its)
            each.tokens += more
            each.cached = len(each.tokens)
            each.next = int(self._context.logits(spoke, self._vocabulary).argmax())

    def _cut(self, told: LlamaCppSession, length: int) -> None:
        """Keep only the first `length` tokens. The next token stays known if no token was removed."""
        if length < len(told.tokens) or told.cached < length:
            del told.tokens[length:]
            told.next = None
        self._forget(told, length)

    def _forget(self, told: LlamaCppSession, length: int) -> None:
        """Keep only the first `length` tokens in the cache, or none if llama.cpp refuses to remove only the others.

        Frees the session's sequence if none are left.
        """
        told.cached = min(told.cached, length)
        if told.sequence is None:
            return
        if not self._context.try_seq_rm(told.sequence, told.cached, -1):
            told.cached = 0
            self._context.seq_rm(told.sequence, 0, -1)
        if not told.cached:
            self._free.append(told.sequence)
            told.sequence = None

    def _taken(self) -> int:
        if not self._free:
            raise OutOfBlocks("out of sequences: 1 needed, 0 free")
        return self._free.pop()

    def _room(self, told: LlamaCppSession, count: int) -> None:
        """Raise CapacityExceeded past the model's context: llama.cpp leaves this check to its callers."""
        if len(told.tokens) + count > self._length:
            raise CapacityExceeded(
                f"context full: {count} tokens needed, {self._length - len(told.tokens)} of {self._length} left"
            )

    def _speaking(self, session: int) -> LlamaCppSession:
        told = self._known(session)
        if not told.tokens:
            raise PositionOutOfRange(f"session {session}: expected at least one token, got none")
        return told

    def _known(self, session: int) -> LlamaCppSession:
        if session not in self._sessions:
            raise SequenceNotFound(f"unknown session {session!r} (never opened, or already closed)")
        return self._sessions[session]
