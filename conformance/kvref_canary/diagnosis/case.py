"""A request with a wrong token, and what the oracle predicts for a supposed damage."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvref.canary import BLANK, Canary, Oracle
from kvref.canary.oracle import Spoil

Answers = list[int | None]
MAX_LOOKBACK = 160  # positions before the first wrong answer: an explanation must predict the right answers there too
MIN_CONFLICTS = 3  # wrong answers; this many rule out most explanations


@dataclass(frozen=True)
class RequestHistory:
    """One request or session with a unique name ("request 7"): all tokens of prompt and answer, in order.

    said: positions of the generated tokens. ended: the request was finished or closed before the wrong one. events: pairs
    (number of tokens at that time, what happened), such as (48, "a prefix hit of 48").
    """

    name: str
    tokens: Sequence[int]
    said: Collection[int] = ()
    ended: bool = False
    events: tuple[tuple[int, str], ...] = ()


class Case:
    """A request and the answers of its engine. Every token fed to the engine is known, and therefore every query.

    queries: positions of the queries with known answers; the first are right ones before the first wrong one. answers: the
    answers.
    """

    def __init__(
        self, canary: Canary, request: RequestHistory, got: Sequence[int], others: Sequence[RequestHistory], roundoff: float
    ) -> None:
        self.canary, self.request, self.others, self.roundoff = canary, request, others, roundoff
        self.tokens = [*request.tokens, *got]
        self.clean_oracle = Oracle(canary, roundoff)
        want = self.clean_oracle.extend(self.tokens)
        said = sorted({*request.said, *range(len(request.tokens), len(self.tokens))} - {0})
        wrong = [at for at in said if want[at - 1] is not None and want[at - 1] != self.tokens[at]]
        self.first_query = wrong[0] - 1 if wrong else len(self.tokens)  # the first query with a wrong answer
        said = [at for at in said if at > self.first_query - MAX_LOOKBACK]
        self.queries = np.array(said, np.int64) - 1
        self.answers = [self.tokens[at] for at in said]
        self.expected_answers: Answers = [want[at - 1] for at in said]

    @property
    def length(self) -> int:
        return len(self.tokens)

    @cached_property
    def wrong(self) -> list[int]:
        """Indices (into `queries`) of the queries that got a wrong answer."""
        return [number for number, want in enumerate(self.expected_answers) if want is not None and want != self.answers[number]]

    @cached_property
    def digits(self) -> NDArray[np.int64]:
        """Digits of the answers, [queries, num_kv_heads]."""
        return np.array([self.canary.digits(token) for token in self.answers])

    @cached_property
    def wrong_digits(self) -> NDArray[np.bool_]:
        """Mask of wrong digits, [queries, num_kv_heads]. All False for a blank, which does not show which head read nothing."""
        right = np.array([self.canary.digits(token if token is not None else BLANK) for token in self.expected_answers])
        blank = np.array([token == BLANK for token in self.answers])
        known = np.isin(np.arange(len(self.answers)), self.wrong)
        return np.asarray((right != self.digits) & (known & ~blank)[:, None])

    @cached_property
    def wrong_heads(self) -> tuple[int, ...]:
        """The heads with wrong digits; all heads if every wrong answer is a blank."""
        wrong = tuple(np.flatnonzero(self.wrong_digits.any(axis=0)).tolist())
        return wrong or tuple(range(self.canary.num_kv_heads))

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """The position that each query should have read in each layer, [queries, num_layers]; -1 if it is not known."""
        canary, queries = self.canary, self.queries
        if canary.recalls:
            tokens = np.array(self.tokens)
            same = (tokens[None, :-1] == tokens[queries, None]) & (np.arange(len(tokens) - 1) < queries[:, None])
            place = np.where(same.any(axis=1), same.shape[1] - same[:, ::-1].argmax(axis=1), -1)
        else:
            place = queries - canary.reach(canary.num_layers - 1)
        columns = [place]
        for layer in reversed(range(canary.num_layers - 1)):
            columns.insert(0, columns[0] - canary.reach(layer))
        return np.where(place[:, None] < 0, -1, np.maximum(np.stack(columns, axis=1), -1))

    @cached_property
    def sources(self) -> NDArray[np.int64]:
        """The position of the token whose digits each query should have found, [queries]; -1 if it is not known."""
        if self.canary.recalls:
            return self.places[:, -1]
        return np.maximum(self.places[:, 0], -1)

    def replay(self, since: int, spoil: Spoil | None, windows: tuple[int | None, ...] = (), soon: bool = False) -> Answers:
        """Return the oracle's answers if queries from position `since` on read spoilt entries; soon: first wrong ones only."""
        since = max(0, min(since, self.first_query))
        stop = int(self.queries[self.wrong[:MIN_CONFLICTS][-1]]) + 1 if soon else self.length
        said = self.clean_oracle.upto(since, windows).extend(self.tokens[since:stop], spoil)
        asked = zip(self.queries, self.expected_answers, strict=True)
        return [want if at < since else said[at - since] if at < stop else None for at, want in asked]

    def replay_with_tokens(self, tokens: Sequence[int]) -> Answers:
        """Return the oracle's answers if the engine had these tokens up to and including the query of the first wrong answer."""
        shared = next((at for at, pair in enumerate(zip(tokens, self.tokens, strict=False)) if pair[0] != pair[1]), len(tokens))
        tail = [*tokens, *self.tokens[self.first_query + 1 :]]
        said = self.clean_oracle.upto(shared).extend(tail[shared:])
        moved = len(tail) - self.length - shared
        return [
            said[at + moved] if at >= self.first_query else want
            for at, want in zip(self.queries, self.expected_answers, strict=True)
        ]

    def conflicts(self, said: Answers) -> list[int]:
        """Return the queries whose answers contradict `said`."""
        return [number for number, token in enumerate(said) if token is not None and token != self.answers[number]]

    def evidence(self, said: Answers, blanks: bool = False) -> float:
        """Return the bits of the wrong digits that `said` predicts.

        blanks: also count the bits of one digit for each blank that the oracle leaves undetermined. An engine generates a blank
        if a head cannot distinguish positions, for example because keys are missing.
        """
        told = [at for at in self.wrong if said[at] == self.answers[at] or (blanks and self._blank(said, at))]
        return float(self.canary.bits * sum(max(1, int(self.wrong_digits[at].sum())) for at in told))

    def _blank(self, said: Answers, number: int) -> bool:
        return self.answers[number] == BLANK and said[number] is None

    def num_undetermined(self, said: Answers) -> int:
        """Return the number of queries that `said` leaves undetermined although they have an answer."""
        vague = [number for number, want in enumerate(self.expected_answers) if want is not None and said[number] is None]
        return sum(not self._blank(said, number) for number in vague)

    def is_earlier_state(self, other: RequestHistory) -> bool:
        """Whether a history is that of this request before some of its tokens were removed."""
        return other.ended and other.name.startswith(f"{self.request.name} before ")

    def oracle_of(self, other: RequestHistory) -> Oracle:
        if other is self.request:
            return self.clean_oracle
        if other.name not in self._oracles:
            self._oracles[other.name] = Oracle(self.canary, self.roundoff)
            self._oracles[other.name].extend(other.tokens)
        return self._oracles[other.name]

    @cached_property
    def _oracles(self) -> dict[str, Oracle]:
        return {}
