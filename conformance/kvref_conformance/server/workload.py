"""What a server is asked under load: requests as people send them, of words that tell whose they are."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvref.canary import BOS, FIRST_WORD, Canary, Oracle

# How often each kind comes. branch: two at once that go on from the same conversation, each with words of its own. cut off: a
# stream that is closed in the middle. several: more than one answer to a request.
KINDS = {"new": 3, "prefix": 3, "goes on": 4, "branch": 2, "changed": 2, "long": 1, "cut off": 2, "several": 1}
FEW = 8  # words, at most, by which two branches differ before they are answered
ALPHABETS = 8  # shares of the words: a conversation has one for itself
PREFIXES = 4  # system prompts
KEPT = 64  # conversations that may go on
MEDIAN, SCATTER = 40.0, 0.8  # tokens of a turn and of an answer beyond the least; of their logarithms
ANSWERS = 3  # of a request for several


@dataclass(frozen=True)
class Conversation:
    """tokens: told and said. oracle: of these."""

    tokens: list[int]
    oracle: Oracle
    alphabet: int


@dataclass(frozen=True)
class Request:
    """prompt: its first `shared` tokens are those of `base`. count: tokens to be said, n times."""

    number: int
    kind: str
    prompt: list[int]
    count: int
    base: Conversation
    shared: int
    stream: bool
    n: int = 1


class Workload:
    """Requests drawn from a seed and from what was said. Not more than `room` tokens each, the answer with them."""

    def __init__(self, canary: Canary, seed: int) -> None:
        self.canary, self.room = canary, canary.context
        self.several = True  # until the server says that it has no such thing
        self._rng = np.random.default_rng(seed)
        self._drawn = 0
        self._going: deque[Conversation] = deque(maxlen=KEPT)
        self._twin: Conversation | None = None  # what the next request branches from, as the last one did
        self._begin = self._grown(Conversation([], Oracle(canary), 0), [BOS])
        self._prefixes = [self._prefix(number) for number in range(PREFIXES)]

    def draw(self) -> Request:
        """The next request."""
        kinds = [kind for kind in KINDS if self._possible(kind)]
        shares = np.array([KINDS[kind] for kind in kinds], float)
        kind = "branch" if self._twin else str(self._rng.choice(kinds, p=shares / shares.sum()))
        number, self._drawn = self._drawn, self._drawn + 1
        base, shared, more = self._begun(kind, number % ALPHABETS)
        prompt = [*base.tokens[:shared], *more][: self.room - 1]
        if self.canary.recalls:  # it is asked what came behind a word that was there before
            prompt = self._asking(prompt, shared)
        least = self.canary.period if kind == "branch" else 1  # so that all that lies behind the fork is read
        count = min(self._length(least), self.room - len(prompt))
        stream = kind == "cut off" or (kind != "several" and bool(self._rng.integers(2)))
        return Request(number, kind, prompt, count, base, shared, stream, ANSWERS if kind == "several" else 1)

    def right(self, request: Request, said: Sequence[int]) -> tuple[list[int | None], Oracle]:
        """What each token said must be, behind those before it; None where it hangs on rounding. And the oracle of all."""
        oracle = request.base.oracle.upto(request.shared)
        told = oracle.extend([*request.prompt[request.shared :], *said])
        return told[len(request.prompt) - request.shared - 1 :][: len(said)], oracle

    def answered(self, request: Request, said: Sequence[int], oracle: Oracle) -> None:
        """A conversation that may go on from here, where there is room."""
        tokens = [*request.prompt, *said]
        if len(tokens) < self.room - 1:  # a token more, and an answer
            self._going.append(Conversation(tokens, oracle, request.base.alphabet))

    def _possible(self, kind: str) -> bool:
        if kind in ("goes on", "branch", "changed"):
            return bool(self._going)
        return kind != "several" or self.several

    def _begun(self, kind: str, alphabet: int) -> tuple[Conversation, int, list[int]]:
        """What a request begins with, how many tokens of it, and what comes behind them."""
        if kind == "branch":
            base = self._twin or self._going[int(self._rng.integers(len(self._going)))]
            self._twin = None if self._twin else base
            return base, len(base.tokens), self._words(int(self._rng.integers(1, FEW + 1)), alphabet)
        if kind in ("goes on", "changed"):
            place = int(self._rng.integers(len(self._going)))
            base = self._going[place]
            if kind == "goes on":
                del self._going[place]
                if not self._rng.integers(4):  # nothing new is told: all of it may lie in a cache
                    return base, len(base.tokens) - 1, base.tokens[-1:]
                return base, len(base.tokens), self._words(self._length(1), base.alphabet)
            # One of its tokens is another, those behind it stay. Every other time it is one that is read again at once.
            least = max(1, len(base.tokens) - self.canary.period) if self._rng.integers(2) else 1
            shared = int(self._rng.integers(least, len(base.tokens)))
            return base, shared, [*self._words(1, alphabet), *base.tokens[shared + 1 :]]
        if kind == "prefix":
            base = self._prefixes[int(self._rng.integers(PREFIXES))]
            return base, len(base.tokens), self._words(self._length(1), alphabet)  # often so few that the prefix is read
        least = int(self._rng.integers(self.room // 2, self.room)) if kind == "long" else self._length(self.canary.period)
        return Conversation(self._begin.tokens, self._begin.oracle, alphabet), 1, self._words(least, alphabet)

    def _prefix(self, number: int) -> Conversation:
        length = min(self.room // 3, int(self._rng.integers(16, 200)))
        return self._grown(self._begin, self._words(length, number))

    def _grown(self, base: Conversation, more: list[int]) -> Conversation:
        oracle = base.oracle.upto(len(base.tokens))
        oracle.extend(more)
        return Conversation([*base.tokens, *more], oracle, base.alphabet)

    def _length(self, least: int) -> int:
        return least + int(self._rng.lognormal(math.log(MEDIAN), SCATTER))

    def _asking(self, prompt: list[int], shared: int) -> list[int]:
        """A prompt of which a word comes again at its end; those behind the shared ones are new to it, while there are such."""
        fresh = [word for word in range(FIRST_WORD, FIRST_WORD + self.canary.words) if word not in prompt[:shared]]
        drawn = [int(word) for word in self._rng.permutation(fresh)][: len(prompt) - shared - 1]
        told = [*prompt[:shared], *drawn]
        return [*told, told[int(self._rng.integers(len(told) // 4, len(told)))]]

    def _words(self, count: int, alphabet: int) -> list[int]:
        share = self.canary.words // ALPHABETS
        return [FIRST_WORD + alphabet * share + int(word) for word in self._rng.integers(share, size=count)]
