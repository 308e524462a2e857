"""What checks tell an engine, and hold it to: a session beside the list of tokens that it must be."""

from collections.abc import Sequence

from kvref.canary import BOS, FIRST_WORD, Canary, Oracle, sized
from kvref_conformance.checking.expect import equal
from kvref_conformance.checking.setup import new
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.engine import CANARY, FAMILY
from kvref_conformance.families.engine.model import Session, shown
from kvref_conformance.outcome import Broken

SESSIONS = 5  # of a whole context, for which a cache has room unless a check asks for less


class Talk:
    """One engine, and what was said in each of its sessions."""

    def __init__(self, subject: Subject, **sizes: int) -> None:
        self.subject = subject
        context = subject.size("context", sizes.get("context", FAMILY.small["context"]))
        self.engine: Handle = new(subject, "engine", **{"cache_tokens": SESSIONS * context} | sizes)
        self.canary: Canary = sized(**{name: self.engine.config[name] for name in CANARY})
        self.told: dict[int, Session] = {}

    def prompt(self, count: int = 0, among: Sequence[int] = ()) -> list[int]:
        """Begin-of-text and words at random, a period and a few more unless told how many. All differ where it recalls.

        among: the numbers of the words that it is made of.
        """
        count = count or self.canary.period + 5
        words = list(among) or list(range(self.canary.words))
        drawn = self.subject.rng.choice(words, size=count, replace=not self.canary.recalls)
        return [BOS, *(FIRST_WORD + int(word) for word in drawn)]

    def begin(self, *pieces: Sequence[int]) -> int:
        """A new session that is told a prompt in these pieces."""
        session = int(self.engine.open())
        self.told[session] = Session(Oracle(self.canary))
        for piece in pieces:
            self.tell(session, piece)
        return session

    def tell(self, session: int, tokens: Sequence[int]) -> None:
        self.engine.extend(session, list(tokens))
        self.told[session].told(tokens)

    def goes_on(self, session: int, count: int, what: str) -> list[int]:
        """Let it say so many tokens, and hold each to what it must be. Raises Broken."""
        said = [int(token) for token in self.engine.generate(session, count)]
        equal(len(said), count, f"tokens generated, {what}")
        self.hold(session, said, what)
        return said

    def together(self, sessions: Sequence[int], times: int, what: str) -> None:
        """Let each of several say a token, again and again."""
        for _ in range(times):
            said = [int(token) for token in self.engine.step(list(sessions))]
            equal(len(said), len(sessions), f"tokens of a step of {len(sessions)} sessions, {what}")
            for session, token in zip(sessions, said, strict=True):
                self.hold(session, [token], what)

    def hold(self, session: int, said: Sequence[int], what: str) -> None:
        """Raises Broken at the first token that a session may not say, and takes note of those that it said."""
        told = self.told[session]
        if wrong := told.first_wrong(said):
            place, right = wrong
            where = f"token {len(told.tokens) + place} of session {session}, {what}"
            raise Broken(where, shown(said[:place], right), shown(said[:place], said[place]))
        told.told(said)

    def sample(self, session: int, n: int, count: int, what: str) -> None:
        """Let it say so many tokens n times, each time what it must say as it is."""
        said = [int(token) for token in self.engine.sample(session, n, count)]
        equal(len(said), n * count, f"tokens of {n} answers, {what}")
        for number in range(n):
            alone = self.told[session].copy()
            self.hold(session, said[number * count : (number + 1) * count], f"answer {number} of {n}, {what}")
            self.told[session] = alone

    def load(self, saved: int, told: Session) -> int:
        """A new session of what was saved, which is held to what had been told then."""
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
        self.told[session] = Session(Oracle(self.canary))
        self.told[session].told(tokens)
