"""What is known of a request whose engine said a wrong token, and what the oracle makes of a supposed damage."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvref.canary import BLANK, Canary, Oracle
from kvref.canary.oracle import Spoil

Said = list[int | None]
LOOKED_BACK = 160  # positions before the first wrong answer: the right ones there an explanation must foretell too
FEW = 3  # wrong answers, that rule out most explanations


@dataclass(frozen=True)
class Told:
    """One request or session, of a name that is its own ("request 7"): all tokens told and said, in order.

    said: the positions of those that the engine said itself. ended: it was finished or closed before. events: (position, what
    happened when it had so many tokens), such as (48, "a prefix hit of 48").
    """

    name: str
    tokens: Sequence[int]
    said: Collection[int] = ()
    ended: bool = False
    events: tuple[tuple[int, str], ...] = ()


class Case:
    """A request and what its engine answered. Every token that the engine was fed is known: so is every query.

    queries: the positions of those whose answers are known, from some right ones before the first wrong one on. got: the answers.
    """

    def __init__(self, canary: Canary, request: Told, got: Sequence[int], others: Sequence[Told], roundoff: float) -> None:
        self.canary, self.request, self.others, self.roundoff = canary, request, others, roundoff
        self.tokens = [*request.tokens, *got]
        self.clean = Oracle(canary, roundoff)
        want = self.clean.extend(self.tokens)
        said = sorted({*request.said, *range(len(request.tokens), len(self.tokens))} - {0})
        wrong = [at for at in said if want[at - 1] is not None and want[at - 1] != self.tokens[at]]
        self.begin = wrong[0] - 1 if wrong else len(self.tokens)  # the first query with a wrong answer
        said = [at for at in said if at > self.begin - LOOKED_BACK]
        self.queries = np.array(said, np.int64) - 1
        self.got = [self.tokens[at] for at in said]
        self.want: Said = [want[at - 1] for at in said]

    @property
    def length(self) -> int:
        return len(self.tokens)

    @cached_property
    def wrong(self) -> list[int]:
        """Numbers of the queries that got a wrong answer."""
        return [number for number, want in enumerate(self.want) if want is not None and want != self.got[number]]

    @cached_property
    def digits(self) -> NDArray[np.int64]:
        """Of what came, [queries, num_kv_heads]."""
        return np.array([self.canary.digits(token) for token in self.got])

    @cached_property
    def wrong_digits(self) -> NDArray[np.bool_]:
        """[queries, num_kv_heads]. Of a blank, which does not say which head read nothing, none."""
        right = np.array([self.canary.digits(token if token is not None else BLANK) for token in self.want])
        blank = np.array([token == BLANK for token in self.got])
        known = np.isin(np.arange(len(self.got)), self.wrong)
        return np.asarray((right != self.digits) & (known & ~blank)[:, None])

    @cached_property
    def wrong_heads(self) -> tuple[int, ...]:
        """Those whose digits were wrong; all of them where only blanks came."""
        wrong = tuple(np.flatnonzero(self.wrong_digits.any(axis=0)).tolist())
        return wrong or tuple(range(self.canary.num_kv_heads))

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """Where what each query should have found was read in each layer, [queries, num_layers]; -1 where that is not known."""
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
        """The position of the token whose digits each query should have found, [queries]; -1 where that is not known."""
        if self.canary.recalls:
            return self.places[:, -1]
        return np.maximum(self.places[:, 0], -1)

    def replay(self, since: int, spoil: Spoil | None, windows: tuple[int | None, ...] = (), soon: bool = False) -> Said:
        """What the oracle answers if all queries from position `since` on read what is spoilt; soon: to the first wrong ones."""
        since = max(0, min(since, self.begin))
        stop = int(self.queries[self.wrong[:FEW][-1]]) + 1 if soon else self.length
        said = self.clean.upto(since, windows).extend(self.tokens[since:stop], spoil)
        asked = zip(self.queries, self.want, strict=True)
        return [want if at < since else said[at - since] if at < stop else None for at, want in asked]

    def retold(self, tokens: Sequence[int]) -> Said:
        """What the oracle answers if the engine had these tokens before the first wrong answer's query, that one among them."""
        shared = next((at for at, pair in enumerate(zip(tokens, self.tokens, strict=False)) if pair[0] != pair[1]), len(tokens))
        tail = [*tokens, *self.tokens[self.begin + 1 :]]
        said = self.clean.upto(shared).extend(tail[shared:])
        moved = len(tail) - self.length - shared
        return [said[at + moved] if at >= self.begin else want for at, want in zip(self.queries, self.want, strict=True)]

    def conflicts(self, said: Said) -> list[int]:
        """The queries that contradict this."""
        return [number for number, token in enumerate(said) if token is not None and token != self.got[number]]

    def evidence(self, said: Said, blanks: bool = False) -> float:
        """Bits of the wrong digits that this foretells.

        blanks: those of one digit too for a blank of which the oracle says nothing. It comes where a head cannot tell places
        apart, as where keys are missing.
        """
        told = [at for at in self.wrong if said[at] == self.got[at] or (blanks and self._blank(said, at))]
        return float(self.canary.bits * sum(max(1, int(self.wrong_digits[at].sum())) for at in told))

    def _blank(self, said: Said, number: int) -> bool:
        return self.got[number] == BLANK and said[number] is None

    def vague(self, said: Said) -> int:
        """Queries of which this says nothing, though there is something to say."""
        vague = [number for number, want in enumerate(self.want) if want is not None and said[number] is None]
        return sum(not self._blank(said, number) for number in vague)

    def oracle_of(self, other: Told) -> Oracle:
        if other is self.request:
            return self.clean
        if other.name not in self._oracles:
            self._oracles[other.name] = Oracle(self.canary, self.roundoff)
            self._oracles[other.name].extend(other.tokens)
        return self._oracles[other.name]

    @cached_property
    def _oracles(self) -> dict[str, Oracle]:
        return {}
