"""Sessions of an engine paired with their expected tokens, for use in checks."""

from collections.abc import Sequence

from kvref.canary import BOS, FIRST_WORD, Canary, Oracle, sized
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.engine import CANARY, FAMILY
from kvref_conformance.families.engine.model import SessionModel, shown
from kvref_conformance.outcome import Broken
from kvref_conformance.testlib.assertions import assert_equal
from kvref_conformance.testlib.fixtures import new

SESSIONS = 5  # default cache size, in sessions of full context length


class EngineFixture:
    """One engine and the expected state of each of its sessions."""

    def __init__(self, subject: Subject, **sizes: int) -> None:
        self.subject = subject
        context = subject.size("context", sizes.get("context", FAMILY.small["context"]))
        self.engine: ObjectProxy = new(subject, "engine", **{"cache_tokens": SESSIONS * context} | sizes)
        self.canary: Canary = sized(**{name: self.engine.config[name] for name in CANARY})
        self.told: dict[int, SessionModel] = {}

    def prompt(self, count: int = 0, among: Sequence[int] = ()) -> list[int]:
        """Begin-of-text and `count` random words, by default the period plus 5. If the canary recalls, all words are distinct.

        among: the numbers of the words to draw from, by default all.
        """
        count = count or self.canary.period + 5
        words = list(among) or list(range(self.canary.words))
        drawn = self.subject.rng.choice(words, size=count, replace=not self.canary.recalls)
        return [BOS, *(FIRST_WORD + int(word) for word in drawn)]

    def begin(self, *pieces: Sequence[int]) -> int:
        """Open a session and append a prompt to it in these chunks."""
        session = int(self.engine.open())
        self.told[session] = SessionModel(Oracle(self.canary))
        for piece in pieces:
            self.tell(session, piece)
        return session

    def tell(self, session: int, tokens: Sequence[int]) -> None:
        self.engine.extend(session, list(tokens))
        self.told[session].told(tokens)

    def goes_on(self, session: int, count: int, what: str) -> list[int]:
        """Generate `count` tokens, check them and return them. Raises Broken if one is wrong."""
        said = [int(token) for token in self.engine.generate(session, count)]
        assert_equal(len(said), count, f"number of generated tokens, {what}")
        self.hold(session, said, what)
        return said

    def together(self, sessions: Sequence[int], times: int, what: str) -> None:
        """Run `times` steps, each of which generates one token per session. Raises Broken if one is wrong."""
        for _ in range(times):
            said = [int(token) for token in self.engine.step(list(sessions))]
            assert_equal(len(said), len(sessions), f"number of tokens that a step of {len(sessions)} sessions returned, {what}")
            for session, token in zip(sessions, said, strict=True):
                self.hold(session, [token], what)

    def hold(self, session: int, said: Sequence[int], what: str) -> None:
        """Add generated tokens to the expected state. Raises Broken at the first wrong token."""
        told = self.told[session]
        if wrong := told.first_wrong(said):
            place, right = wrong
            where = f"token {len(told.tokens) + place} of session {session}, {what}"
            raise Broken(where, shown(said[:place], right), shown(said[:place], said[place]))
        told.told(said)

    def sample(self, session: int, n: int, count: int, what: str) -> None:
        """Sample n answers of `count` tokens. Raises Broken if one is wrong. The session stays as it was."""
        said = [int(token) for token in self.engine.sample(session, n, count)]
        assert_equal(len(said), n * count, f"number of tokens that sample returned for {n} answers, {what}")
        for number in range(n):
            alone = self.told[session].copy()
            self.hold(session, said[number * count : (number + 1) * count], f"answer {number} of {n}, {what}")
            self.told[session] = alone

    def load(self, saved: int, told: SessionModel) -> int:
        """Load a saved session. It is expected to continue from `told`, the state at the time of saving."""
        session = int(self.engine.load(saved))
        self.told[session] = told.copy()
        return session

    def close(self, session: int) -> None:
        self.engine.close(session)
        del self.told[session]

    def fork(self, session: int) -> int:
        child = int(self.engine.fork(session))
        self.told[child] = self.told[session].copy()
        return child

    def truncate(self, session: int, length: int) -> None:
        self.engine.truncate(session, length)
        self._anew(session, self.told[session].tokens[:length])

    def remove(self, session: int, start: int, stop: int) -> None:
        self.engine.remove(session, start, stop)
        told = self.told[session].tokens
        self._anew(session, told[:start] + told[stop:])

    def _anew(self, session: int, tokens: Sequence[int]) -> None:
        self.told[session] = SessionModel(Oracle(self.canary))
        self.told[session].told(tokens)
