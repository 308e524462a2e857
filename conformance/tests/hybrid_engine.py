"""A correct engine of hybrid canaries, whose sessions are oracles, and engines with one fault of the recurrent state each."""

import copy
from typing import Any

from kvref.canary import BLANK
from kvref.canary.hybrid import HYBRIDS, HybridOracle, Matrix, engine_canary
from kvref.errors import CapacityExceeded, PositionOutOfRange, SequenceNotFound, TokenOutOfRange, in_range
from kvref_zoo.mutant import NumpyImplementation


class HybridEngines(NumpyImplementation):
    """architecture: of the only canary that the engines load."""

    def __init__(self, architecture: str, sessions: Any) -> None:
        self.name = f"hybrid engine of {architecture}"
        only = {"recurrent": HYBRIDS.index(architecture) + 1, "recalls": 0, "window": 0}
        self.limits = {"engine": only | {"context": {"least": 256, "most": 512}}}
        self._sessions = sessions

    def engine(self, cache_tokens: int, **sizes: int) -> Any:
        return self._sessions(engine_canary(**sizes))


class HybridSession:
    """next: the token after the last one; a token that the oracle does not predict is the blank."""

    def __init__(self, architecture: str) -> None:
        self.oracle, self.next = HybridOracle(architecture), BLANK

    def append(self, tokens: Any) -> None:
        for token in self.oracle.extend(map(int, tokens)):
            self.next = BLANK if token is None else token

    @property
    def tokens(self) -> list[int]:
        return self.oracle.tokens

    def upto(self, length: int) -> "HybridSession":
        made = HybridSession(self.oracle.architecture)
        made.append(self.tokens[:length])
        return made


class HybridEngine:
    def __init__(self, canary: Any) -> None:
        self.canary, self.opened = canary, 0
        self.sessions: dict[int, HybridSession] = {}
        self.saved: list[HybridSession] = []

    def open(self) -> int:
        return self.begin(HybridSession(self.canary.architecture))

    def close(self, session: int) -> None:
        self.known(session)
        del self.sessions[session]

    def length(self, session: int) -> int:
        return len(self.known(session).tokens)

    def extend(self, session: int, tokens: Any) -> None:
        known = self.known(session)
        for token in tokens:
            in_range(token, self.canary.vocabulary, TokenOutOfRange, "token")
        self.require_room(known, len(tokens))
        self.append_prompt(known, tokens)

    def generate(self, session: int, count: int) -> list[int]:
        known = self.speaking(session)
        room = self.canary.context - len(known.tokens)
        for _ in range(min(in_range(count, None, PositionOutOfRange, "count"), room)):
            known.append([known.next])
        return known.tokens[len(known.tokens) - min(count, room) :]

    def step(self, sessions: Any) -> list[int]:
        speaking = [self.speaking(session) for session in sessions]
        for known in speaking:
            self.require_room(known, 1)
        for known in speaking:
            known.append([known.next])
        return [known.tokens[-1] for known in speaking]

    def sample(self, session: int, n: int, count: int) -> list[int]:
        known = self.speaking(session)
        self.require_room(known, in_range(count, None, PositionOutOfRange, "count"))
        forks = [self.fork(session) for _ in range(in_range(n, None, PositionOutOfRange, "n"))]
        said = [token for fork in forks for token in self.generate(fork, count)]
        for fork in forks:
            self.close(fork)
        return said

    def cancel(self, session: int, count: int) -> None:
        known = self.speaking(session)
        self.require_room(known, in_range(count, None, PositionOutOfRange, "count"))

    def fork(self, session: int) -> int:
        return self.begin(copy.deepcopy(self.known(session)))

    def save(self, session: int) -> int:
        self.saved.append(copy.deepcopy(self.known(session)))
        return len(self.saved) - 1

    def load(self, saved: int) -> int:
        if not 0 <= saved < len(self.saved):
            raise SequenceNotFound(f"saved: expected a value returned by `save`, got {saved!r}")
        return self.begin(copy.deepcopy(self.saved[saved]))

    def truncate(self, session: int, length: int) -> None:
        known = self.known(session)
        self.sessions[session] = known.upto(in_range(length, len(known.tokens) + 1, PositionOutOfRange, "length"))

    def append_prompt(self, known: HybridSession, tokens: Any) -> None:
        known.append(tokens)

    def begin(self, session: HybridSession) -> int:
        self.opened += 1
        self.sessions[self.opened] = session
        return self.opened

    def known(self, session: int) -> HybridSession:
        if session not in self.sessions:
            raise SequenceNotFound(f"unknown session {session!r}")
        return self.sessions[session]

    def speaking(self, session: int) -> HybridSession:
        known = self.known(session)
        if not known.tokens:
            raise PositionOutOfRange(f"session {session}: expected at least one token, got none")
        return known

    def require_room(self, known: HybridSession, count: int) -> None:
        if len(known.tokens) + count > self.canary.context:
            raise CapacityExceeded(f"{count} tokens needed, {self.canary.context - len(known.tokens)} left")


class CopiesShareTheMatrix(HybridEngine):
    def fork(self, session: int) -> int:
        made = super().fork(session)
        self.sessions[made].oracle.matrix = self.sessions[session].oracle.matrix
        return made


class CopyHasTheDrafts(HybridEngine):
    """The copy of a session that was rolled back has the state of before."""

    def __init__(self, canary: Any) -> None:
        super().__init__(canary)
        self.before: dict[int, Matrix | None] = {}

    def truncate(self, session: int, length: int) -> None:
        before = copy.deepcopy(self.known(session).oracle.matrix)
        super().truncate(session, length)
        self.before[session] = before

    def fork(self, session: int) -> int:
        made = super().fork(session)
        if session in self.before:
            self.sessions[made].oracle.matrix = copy.deepcopy(self.before[session])
        return made


class TruncationKeepsTheMatrix(HybridEngine):
    def truncate(self, session: int, length: int) -> None:
        before = self.known(session).oracle.matrix
        super().truncate(session, length)
        self.sessions[session].oracle.matrix = before


class LoadedMatrixIsEmpty(HybridEngine):
    def load(self, saved: int) -> int:
        made = super().load(saved)
        empty = HybridOracle(self.canary.architecture).matrix
        assert empty
        empty.previous = self.sessions[made].oracle.matrix.previous  # type: ignore[union-attr]
        self.sessions[made].oracle.matrix = empty
        return made


class NewSessionHasTheMatrixOfTheLast(HybridEngine):
    left: Matrix | None = None

    def close(self, session: int) -> None:
        self.left = self.known(session).oracle.matrix
        super().close(session)

    def open(self) -> int:
        made = super().open()
        if self.left is not None:
            self.left.previous = self.sessions[made].oracle.matrix.previous  # type: ignore[union-attr]
            self.sessions[made].oracle.matrix = self.left
        return made


class CancelAdvancesTheState(HybridEngine):
    def cancel(self, session: int, count: int) -> None:
        super().cancel(session, count)
        known = self.known(session)
        ahead = copy.deepcopy(known)
        for _ in range(count // 2):
            ahead.append([ahead.next])
        known.oracle.matrix = ahead.oracle.matrix


class BatchIsReordered(HybridEngine):
    """The matrices of the first and the last session change places if a batch is the last one in reverse."""

    order: tuple[int, ...] = ()

    def step(self, sessions: Any) -> list[int]:
        said = super().step(sessions)
        if len(sessions) > 1 and tuple(sessions[::-1]) == self.order:
            first, last = self.known(sessions[0]).oracle, self.known(sessions[-1]).oracle
            first.matrix, last.matrix = last.matrix, first.matrix
        self.order = tuple(sessions)
        return said


class ChunkForgetsTheConvolution(HybridEngine):
    def append_prompt(self, known: HybridSession, tokens: Any) -> None:
        if known.oracle.matrix and known.tokens:
            known.oracle.matrix.previous = HybridOracle(self.canary.architecture).matrix.previous  # type: ignore[union-attr]
        super().append_prompt(known, tokens)


class NewSessionHasTheConvolutionOfTheLast(HybridEngine):
    previous: int | None = None

    def close(self, session: int) -> None:
        self.previous = self.known(session).oracle.matrix.previous  # type: ignore[union-attr]
        super().close(session)

    def open(self) -> int:
        made = super().open()
        if self.previous is not None:
            self.sessions[made].oracle.matrix.previous = self.previous  # type: ignore[union-attr]
        return made


class LoadedConvolutionIsEmpty(HybridEngine):
    def load(self, saved: int) -> int:
        made = super().load(saved)
        empty = HybridOracle(self.canary.architecture).matrix
        self.sessions[made].oracle.matrix.previous = empty.previous  # type: ignore[union-attr]
        return made


class PrefillForgetsTheConvolution(HybridEngine):
    """After each 64 tokens of a prompt, as a kernel with chunks of this size may."""

    def append_prompt(self, known: HybridSession, tokens: Any) -> None:
        for start in range(0, len(tokens), 64):
            if start:
                known.oracle.matrix.previous = HybridOracle(self.canary.architecture).matrix.previous  # type: ignore[union-attr]
            known.append(tokens[start : start + 64])
