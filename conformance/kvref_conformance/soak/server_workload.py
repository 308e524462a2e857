"""Requests to a server under load: realistic conversations, with words that identify their conversation."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvref.canary import BOS, FIRST_WORD, Oracle
from kvref.canary.hybrid import LAP, AnyCanary, HybridCanary, HybridOracle, laps, new_oracle

# Relative frequency of each kind. branch: two concurrent requests that continue the same conversation with different words.
# cut off: a stream that is closed in the middle. several: more than one answer to a request.
KINDS = {"new": 3, "prefix": 3, "goes on": 4, "branch": 2, "changed": 2, "long": 1, "cut off": 2, "several": 1}
MIN_TOKENS = 8  # maximum number of words that a branch appends
NUM_ALPHABETS = 8  # disjoint shares of the words: a conversation uses one
NUM_PREFIXES = 4  # system prompts
MAX_SESSIONS = 64  # conversations that may be continued
MEDIAN_LENGTH, LENGTH_SIGMA = 40.0, 0.8  # median tokens of a turn and of an answer beyond the least; sigma of their logarithms
MAX_ANSWERS = 3  # per request of kind "several"


@dataclass(frozen=True)
class ChatSession:
    """tokens: of prompts and answers. oracle: its state after them."""

    tokens: list[int]
    oracle: Oracle | HybridOracle
    alphabet: int


@dataclass(frozen=True)
class CompletionRequest:
    """prompt: its first `shared` tokens are those of `base`. count: tokens to generate, n times."""

    number: int
    kind: str
    prompt: list[int]
    count: int
    base: ChatSession
    shared: int
    stream: bool
    n: int = 1

    @property
    def label(self) -> str:
        """Its kind, as reports name it."""
        return f"{self.kind} answers" if self.kind == "several" else self.kind


class RequestWorkload:
    """Requests drawn from a seed and from earlier answers. Prompt and answer have at most `room` tokens together."""

    def __init__(self, canary: AnyCanary, seed: int) -> None:
        self.canary, self.room = canary, canary.context
        self.several = True  # False once the server has rejected several answers
        self._rng = np.random.default_rng(seed)
        self._drawn = 0
        self._going: deque[ChatSession] = deque(maxlen=MAX_SESSIONS)
        self._twin: ChatSession | None = None  # the last request and the next one branch from it
        self._begin = self._extend(ChatSession([], new_oracle(canary), 0), [BOS])
        self._prefixes = [self._prefix(number) for number in range(NUM_PREFIXES)]

    def draw(self) -> CompletionRequest:
        """The next request."""
        kinds = [kind for kind in KINDS if self._possible(kind)]
        shares = np.array([KINDS[kind] for kind in kinds], float)
        kind = "branch" if self._twin else str(self._rng.choice(kinds, p=shares / shares.sum()))
        number, self._drawn = self._drawn, self._drawn + 1
        base, shared, more = self._choose_base(kind, number % NUM_ALPHABETS)
        prompt = [*base.tokens[:shared], *more][: self.room - 1]
        if self.canary.recalls:  # it repeats the word after an earlier occurrence
            prompt = self._prompt_of(prompt, shared)
        least = self.canary.period if kind == "branch" else 1  # so that every token after the fork is read
        count = min(self._length(least), self.room - len(prompt))
        stream = kind == "cut off" or (kind != "several" and bool(self._rng.integers(2)))
        return CompletionRequest(number, kind, prompt, count, base, shared, stream, MAX_ANSWERS if kind == "several" else 1)

    def expected_tokens(self, request: CompletionRequest, said: Sequence[int]) -> tuple[list[int | None], Oracle | HybridOracle]:
        """Return the right token at each place of the answer (None if it depends on rounding), and the oracle after all."""
        oracle = request.base.oracle.upto(request.shared)
        told = oracle.extend([*request.prompt[request.shared :], *said])
        return told[len(request.prompt) - request.shared - 1 :][: len(said)], oracle

    def add_answer(self, request: CompletionRequest, said: Sequence[int], oracle: Oracle | HybridOracle) -> None:
        """Keep the conversation for later requests, if there is room."""
        tokens = [*request.prompt, *said]
        if len(tokens) < self.room - 1:  # a token more, and an answer
            self._going.append(ChatSession(tokens, oracle, request.base.alphabet))

    def _possible(self, kind: str) -> bool:
        if kind in ("goes on", "branch", "changed"):
            return bool(self._going)
        return kind != "several" or self.several

    def _choose_base(self, kind: str, alphabet: int) -> tuple[ChatSession, int, list[int]]:
        """Return the conversation that a request continues, how many of its tokens, and the tokens after them."""
        if kind == "branch":
            base = self._twin or self._going[int(self._rng.integers(len(self._going)))]
            self._twin = None if self._twin else base
            return base, len(base.tokens), self._words(int(self._rng.integers(1, MIN_TOKENS + 1)), alphabet)
        if kind in ("goes on", "changed"):
            place = int(self._rng.integers(len(self._going)))
            base = self._going[place]
            if kind == "goes on":
                del self._going[place]
                if not self._rng.integers(4):  # no new tokens: the whole prompt may be cached
                    return base, len(base.tokens) - 1, base.tokens[-1:]
                return base, len(base.tokens), self._words(self._length(1), base.alphabet)
            # Replace one token and keep the later ones. In half of the cases the answer reads that token at once.
            least = max(1, len(base.tokens) - self.canary.period) if self._rng.integers(2) else 1
            shared = int(self._rng.integers(least, len(base.tokens)))
            return base, shared, [*self._words(1, alphabet), *base.tokens[shared + 1 :]]
        if kind == "prefix":
            base = self._prefixes[int(self._rng.integers(NUM_PREFIXES))]
            return base, len(base.tokens), self._words(self._length(1), alphabet)  # often short enough to read the prefix
        least = int(self._rng.integers(self.room // 2, self.room)) if kind == "long" else self._length(self.canary.period)
        return ChatSession(self._begin.tokens, self._begin.oracle, alphabet), 1, self._words(least, alphabet)

    def _prefix(self, number: int) -> ChatSession:
        length = min(self.room // 3, int(self._rng.integers(16, 200)))
        return self._extend(self._begin, self._words(length, number))

    def _extend(self, base: ChatSession, more: list[int]) -> ChatSession:
        oracle = base.oracle.upto(len(base.tokens))
        oracle.extend(more)
        return ChatSession([*base.tokens, *more], oracle, base.alphabet)

    def _length(self, least: int) -> int:
        return least + int(self._rng.lognormal(math.log(MEDIAN_LENGTH), LENGTH_SIGMA))

    def _prompt_of(self, prompt: list[int], shared: int) -> list[int]:
        """Return a prompt that ends with one of its earlier words. Words after the shared ones are new, if there are enough."""
        fresh = [word for word in range(FIRST_WORD, FIRST_WORD + self.canary.words) if word not in prompt[:shared]]
        drawn = [int(word) for word in self._rng.permutation(fresh)][: len(prompt) - shared - 1]
        told = [*prompt[:shared], *drawn]
        return [*told, told[int(self._rng.integers(len(told) // 4, len(told)))]]

    def _words(self, count: int, alphabet: int) -> list[int]:
        """Return words of one alphabet; for a canary that continues laps, laps in an order of their own."""
        if isinstance(self.canary, HybridCanary) and self.canary.continues_laps:
            return laps(self._rng.permutation(LAP).tolist(), int(self._rng.integers(LAP)), count)
        share = self.canary.words // NUM_ALPHABETS
        return [FIRST_WORD + alphabet * share + int(word) for word in self._rng.integers(share, size=count)]
