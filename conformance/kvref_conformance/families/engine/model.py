"""Expected replies of an engine, computed from each session's tokens and an oracle that predicts the next token."""

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvref.canary import Oracle
from kvref.canary.hybrid import AnyCanary, HybridOracle, engine_canary, new_oracle
from kvref_conformance.calls.messages import format_value
from kvref_conformance.exceptions import ClauseViolation
from kvref_conformance.oracle.expectations import AcceptedOrError, AnyOf, ExactValue, Expectation, range_errors
from kvref_conformance.oracle.reference_model import ReadCall, ReferenceModel

COARSEST = 64  # largest assumed block size: rounding up to blocks may cost each session up to this number of tokens
NEW = -1  # key for a session that does not exist yet
# Clauses to which a wrong token can be attributed, by the session's history. The last one that applies is reported.
BLAMED = ("ENG-01", "ENG-02", "ENG-03", "ENG-07", "ENG-04", "ENG-05", "ENG-06", "ENG-08", "ENG-10")
SHOWN = 8  # number of tokens printed before a wrong one
PREFIX = 8  # number of equal first tokens from which two sessions count as sharing a prefix


@dataclass
class SessionModel:
    """tokens: prompt tokens and generated tokens. next: the required next token, or None if it depends on rounding or there are
    no tokens.

    clause: the element of BLAMED to which a wrong token is attributed.
    """

    oracle: Oracle | HybridOracle
    tokens: list[int] = field(default_factory=list)
    next: int | None = None
    clause: str = "ENG-01"
    has_generated: bool = False

    def append(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        for token in self.oracle.extend(tokens)[-1:]:
            self.next = token

    def blame(self, clause: str) -> None:
        self.clause = max(self.clause, clause, key=BLAMED.index)

    def copy(self) -> "SessionModel":
        return SessionModel(self.oracle.upto(len(self.tokens)), list(self.tokens), self.next, self.clause, self.has_generated)

    def continuation(self, count: int) -> list[int] | None:
        """The next `count` tokens, or None if one of them depends on rounding."""
        future = self.copy()
        while len(future.tokens) < len(self.tokens) + count:
            if future.next is None:
                return None
            future.append([future.next])
        return future.tokens[len(self.tokens) :]

    def first_wrong_token(self, output: Sequence[int]) -> tuple[int, int] | None:
        """The index of the first wrong token and the required token, or None if all are valid."""
        required = [self.next, *self.oracle.upto(len(self.tokens)).extend(output)]
        for place, (want, token) in enumerate(zip(required, output, strict=False)):
            if want is not None and want != token:
                return place, want
        return None


def token_text(tokens: Sequence[int], last: int) -> str:
    """Text of the tokens followed by `last`. Only the latest SHOWN tokens are printed."""
    if len(tokens) <= SHOWN:
        return format_value([*tokens, last])
    return f"[... {len(tokens) - SHOWN} tokens, {', '.join(map(str, [*tokens[-SHOWN:], last]))}]"


@dataclass(frozen=True)
class GeneratedTokens(AcceptedOrError):
    """`each` tokens of every session, concatenated. short: whether the end of the context limits their number."""

    sessions: Sequence[SessionModel] = ()
    each: int = 0
    short: bool = False

    def to_json(self) -> dict[str, Any]:
        certain = [session.continuation(self.each) for session in self.sessions]
        if self.kinds:
            return super().to_json()
        return {"any": True} if None in certain else {"ok": [token for each in certain for token in each or ()]}

    def compare(self, ok: Any, op: str, level: Any) -> None:
        count = self.each * len(self.sessions)
        if len(ok) != count:
            raise ClauseViolation(
                op, f"{count} tokens", f"{len(ok)}: {format_value(list(ok))}", "ENG-11" if self.short else self.clause
            )
        for number, session in enumerate(self.sessions):
            output = list(ok[number * self.each : (number + 1) * self.each])
            if wrong := session.first_wrong_token(output):
                place, token = wrong
                clause = self.clause if session.clause == "ENG-01" else session.clause
                raise ClauseViolation(op, token_text(output[:place], token), token_text(output[:place], output[place]), clause)


@dataclass(frozen=True)
class NewSessionOrError(AcceptedOrError):
    """A new session number, or an error because the cache is full. others: the numbers already in use."""

    says: str = ""
    others: Container[int] = ()

    def compare(self, ok: Any, op: str, level: Any) -> None:
        if ok in self.others:
            raise ClauseViolation(op, self.says, format_value(ok), "ENG-10")


class Engine(ReferenceModel):
    family = "engine"
    clause_after_error = "ENG-10"  # a session behaves as a list of tokens, also after a call that raised
    clause_by_observation: ClassVar = {"length": "ENG-10"}

    def __init__(self, *, cache_tokens: int, **sizes: int) -> None:
        super().__init__()
        self.canary: AnyCanary = engine_canary(**sizes)
        self.cache_tokens = cache_tokens
        self.sessions: dict[int, SessionModel] = {}
        self.closed_tokens: list[list[int]] = []  # of each closed session
        self.saved: dict[int, SessionModel] = {}

    def observations(self) -> list[ReadCall]:
        return [("length", {"session": session}) for session in self.sessions]

    def open(self) -> Expectation:
        then = self.on_success("open", lambda ok: self.sessions.update({ok: SessionModel(new_oracle(self.canary))}))
        return AnyOf("ENG-10", then, range_text=self._new_session_text, accepts=lambda ok: ok not in self.sessions)

    def length(self, session: Any) -> Expectation:
        if session not in self.sessions:
            return self.expect_error([("SequenceNotFound", "ENG-10")])
        return ExactValue(self.clause_of("length"), value=len(self.sessions[session].tokens))

    def extend(self, session: Any, tokens: Any) -> Expectation:
        state = self.sessions.get(session)
        wrong = [each for token in tokens for each in range_errors(token, self.canary.vocabulary, "TokenOutOfRange")]
        if state is None:
            too_long = [("CapacityExceeded", "ENG-11")] if len(tokens) > self.canary.context else []
            return self.expect_error([("SequenceNotFound", "ENG-10"), *wrong, *too_long])
        if len(state.tokens) + len(tokens) > self.canary.context:
            wrong.append(("CapacityExceeded", "ENG-11"))
        if wrong and not self._fits({session: len(tokens)}):  # the implementation may check for room first
            wrong.append(("OutOfBlocks", "ENG-06"))
        if wrong:
            return self.expect_error(wrong)

        def change(ok: Any) -> None:
            if state.tokens:
                state.blame("ENG-07" if state.has_generated else "ENG-03")
            elif any(other[:PREFIX] == tokens[:PREFIX] for other in self._other_tokens(state)):
                state.blame("ENG-04")
            state.append(tokens)

        then = self.on_success("extend", change)
        if self._fits({session: len(tokens)}):
            return Expectation("ENG-06", then)
        return AcceptedOrError("ENG-06", then, kinds=("OutOfBlocks",), on_error=self._refused)

    def generate(self, session: Any, count: Any) -> Expectation:
        def change(ok: Any) -> None:
            state.append(ok)
            state.has_generated = True

        if wrong := self._generation_errors(session, count):
            return self.expect_error(wrong)
        state = self.sessions[session]
        return self._expected_tokens(state.clause, self.on_success("generate", change), session, 1, count, [])

    def sample(self, session: Any, n: Any, count: Any) -> Expectation:
        wrong, times = self._generation_errors(session, count), range_errors(n, None, "PositionOutOfRange")
        if wrong or times:  # the implementation may check for room first
            full = [] if wrong else [(kind, "ENG-06") for kind in self._room_errors(session, count, [])]
            return self.expect_error([*wrong, *times, *full])
        state = self.sessions[session]
        copies = [len(state.tokens) + count] * n
        return self._expected_tokens(
            "ENG-08", self.on_success("sample", lambda ok: state.blame("ENG-08")), session, n, count, copies
        )

    def cancel(self, session: Any, count: Any) -> Expectation:
        if wrong := self._generation_errors(session, count):
            return self.expect_error(wrong)
        then = self.on_success("cancel", lambda ok: self._blame_all("ENG-05"))
        if kinds := self._room_errors(session, count, [len(self.sessions[session].tokens) + count]):
            return AcceptedOrError("ENG-05", then, kinds=kinds, on_error=self._refused)
        return Expectation("ENG-05", then)

    def _generation_errors(self, session: Any, count: Any) -> list[tuple[str, str]]:
        """The errors that generating `count` tokens in this session must raise, with their clauses."""
        wrong = range_errors(count, None, "PositionOutOfRange")
        if session not in self.sessions:
            return [("SequenceNotFound", "ENG-10"), *wrong]
        return wrong or ([] if self.sessions[session].tokens else [("PositionOutOfRange", "ENG-01")])

    def _room_errors(self, session: Any, count: int, copies: Sequence[int]) -> tuple[str, ...]:
        """The errors that generating `count` tokens may raise for lack of room, if copies of these lengths exist meanwhile."""
        room = min(count, self.canary.context - len(self.sessions[session].tokens))
        fits = self._fits({session: room} | {NEW - number: length for number, length in enumerate(copies)})
        return (*(["CapacityExceeded"] if room < count else []), *([] if fits else ["OutOfBlocks"]))

    def _expected_tokens(
        self, clause: str, then: Callable[[Any], None], session: Any, n: int, count: int, copies: Sequence[int]
    ) -> Expectation:
        """n times the next `count` tokens, or fewer if the context ends."""
        state = self.sessions[session]
        room = min(count, self.canary.context - len(state.tokens))
        return GeneratedTokens(
            clause, then, self._room_errors(session, count, copies), self._refused, [state] * n, room, room < count
        )

    def step(self, sessions: Any) -> Expectation:
        states = [self.sessions[session] for session in sessions if session in self.sessions]
        wrong = [("SequenceNotFound", "ENG-10")] if len(states) < len(sessions) else []
        wrong += [("PositionOutOfRange", "ENG-01")] if any(not each.tokens for each in states) else []
        wrong += [("CapacityExceeded", "ENG-11")] if any(len(each.tokens) == self.canary.context for each in states) else []
        if wrong and not self._fits({each: 1 for each in sessions if each in self.sessions}):
            wrong.append(("OutOfBlocks", "ENG-06"))
        if wrong:
            return self.expect_error(wrong)

        def change(ok: Any) -> None:
            for each, token in zip(states, ok, strict=True):
                each.blame("ENG-02" if len(states) > 1 else "ENG-01")
                each.append([token])
                each.has_generated = True

        kinds = () if self._fits(dict.fromkeys(sessions, 1)) else ("OutOfBlocks",)
        return GeneratedTokens("ENG-02", self.on_success("step", change), kinds, self._refused, states, 1)

    def fork(self, session: Any) -> Expectation:
        if session not in self.sessions:
            return self.expect_error([("SequenceNotFound", "ENG-10")])
        parent = self.sessions[session]

        def change(ok: Any) -> None:
            parent.blame("ENG-08")
            self.sessions[ok] = parent.copy()

        return self._new_copy("ENG-08", self.on_success("fork", change), parent)

    def save(self, session: Any) -> Expectation:
        if session not in self.sessions:
            return self.expect_error([("SequenceNotFound", "ENG-10")])
        state = self.sessions[session]
        then = self.on_success("save", lambda ok: self.saved.update({ok: state.copy()}))
        equal = [saved for saved, copy in self.saved.items() if copy.tokens == state.tokens]  # may be the same copy
        says = f"a number not among {sorted(self.saved.keys() - equal)}"
        return AnyOf("ENG-10", then, range_text=says, accepts=lambda ok: ok in equal or ok not in self.saved)

    def load(self, saved: Any) -> Expectation:
        if saved not in self.saved:
            return self.expect_error([("SequenceNotFound", "ENG-10")])

        def change(ok: Any) -> None:
            self.sessions[ok] = self.saved[saved].copy()
            self.sessions[ok].blame("ENG-10")

        return self._new_copy("ENG-10", self.on_success("load", change), self.saved[saved])

    def truncate(self, session: Any, length: Any) -> Expectation:
        if session not in self.sessions:
            return self.expect_error(
                [("SequenceNotFound", "ENG-10"), *range_errors(length, self.canary.context + 1, "PositionOutOfRange")]
            )
        state = self.sessions[session]
        if wrong := range_errors(length, len(state.tokens) + 1, "PositionOutOfRange", "ENG-10"):
            return self.expect_error(wrong)
        return Expectation("ENG-10", self.on_success("truncate", lambda ok: self._replace_tokens(session, state.tokens[:length])))

    def remove(self, session: Any, start: Any, stop: Any) -> Expectation:
        exists = session in self.sessions
        length = len(self.sessions[session].tokens) if exists else self.canary.context  # an unknown session can have any length
        wrong = range_errors(stop, length + 1, "PositionOutOfRange", "ENG-10")
        wrong += range_errors(start, None if wrong else stop + 1, "PositionOutOfRange", "ENG-10")
        if wrong or not exists:
            return self.expect_error([*([] if exists else [("SequenceNotFound", "ENG-10")]), *wrong])
        tokens = self.sessions[session].tokens
        return Expectation(
            "ENG-10", self.on_success("remove", lambda ok: self._replace_tokens(session, tokens[:start] + tokens[stop:]))
        )

    def close(self, session: Any) -> Expectation:
        if session not in self.sessions:
            return self.expect_error([("SequenceNotFound", "ENG-10")])

        def change(ok: Any) -> None:
            self.closed_tokens.append(self.sessions.pop(session).tokens)
            self._blame_all("ENG-05")

        return Expectation("ENG-05", self.on_success("close", change))

    @property
    def _new_session_text(self) -> str:
        return f"a session not among {sorted(self.sessions)}"

    def _replace_tokens(self, session: int, tokens: list[int]) -> None:
        """Replace the session by a new one that contains only these tokens."""
        state = SessionModel(new_oracle(self.canary), clause="ENG-10", has_generated=True)
        state.append(tokens)
        self.sessions[session] = state

    def _other_tokens(self, but: SessionModel) -> list[list[int]]:
        return [*self.closed_tokens, *(each.tokens for each in self.sessions.values() if each is not but)]

    def _fits(self, more: Mapping[int, int]) -> bool:
        """Whether the cache must have room for `more` tokens per session, even if it rounds each up to the coarsest blocks."""
        lengths = Counter({session: len(state.tokens) for session, state in self.sessions.items()}) + Counter(more)
        return sum(-(-length // COARSEST) * COARSEST for length in lengths.values()) <= self.cache_tokens

    def _new_copy(self, clause: str, then: Callable[[Any], None], state: SessionModel) -> Expectation:
        """The number of a new session with the tokens of `state`, or OutOfBlocks if the cache may lack room for them."""
        if self._fits({NEW: len(state.tokens)}):
            return AnyOf(clause, then, range_text=self._new_session_text, accepts=lambda ok: ok not in self.sessions)
        return NewSessionOrError("ENG-06", then, ("OutOfBlocks",), self._refused, self._new_session_text, tuple(self.sessions))

    def _refused(self) -> None:
        self.note_unchanged("refused")
        self._blame_all("ENG-06")

    def _blame_all(self, clause: str) -> None:
        for session in self.sessions.values():
            session.blame(clause)
