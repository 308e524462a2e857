"""Requests as a server gets them: when they come, how long they are, which share a beginning, which are cancelled.

Lengths are lognormal, with the means that Kwon et al. (Efficient Memory Management for Large Language Model Serving with
PagedAttention, SOSP 2023) give for ShareGPT: 161 tokens of prompt, 338 of output. Arrivals are Poisson, as there. How widely
lengths scatter, and how many requests share a prefix or are cancelled, are numbers of ours.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np


class Event(NamedTuple):
    """admit: a request of so many tokens, of which the first `shared` are those of a prefix. step: a token more of each.

    look: every token of one is compared. drop: it is forgotten. pressure: so many tokens more do not fit.
    """

    kind: str
    numbers: tuple[int, ...]
    tokens: int = 0
    prefix: int = 0
    shared: int = 0


class Server(Protocol):
    """A cache that serves: what fits is known without asking it. Requests are known by numbers."""

    most: int  # requests at a time
    longest: int  # tokens of one

    def running(self) -> Sequence[int]: ...
    def fits(self, numbers: Sequence[int], tokens: int = 1) -> bool: ...
    def takes(self, tokens: int) -> bool: ...
    def tokens(self, number: int) -> int: ...
    def do(self, event: Event) -> int: ...


@dataclass(frozen=True)
class Mix:
    """arrivals: requests a step. Lengths in tokens; scatter: of their logarithms. Shares of all requests, and of steps."""

    arrivals: float = 0.25
    prompt: float = 161.0
    output: float = 338.0
    scatter: float = 1.0
    prefixes: int = 4
    sharing: float = 0.3
    cancelled: float = 0.1
    looks: float = 0.05


@dataclass
class Workload:
    """The events of one server, drawn as they are needed: the same seed gives the same, whatever the cache does."""

    server: Server
    rng: np.random.Generator
    mix: Mix = field(default_factory=Mix)
    made: int = 0
    ends: dict[int, int] = field(default_factory=dict)  # by request, the tokens at which it is done
    waiting: list[Event] = field(default_factory=list)

    def events(self) -> Iterator[Event]:
        while True:
            yield from self._arriving()
            yield from self._admitting()
            yield from self._stepping()

    def _length(self, mean: float) -> int:
        """At least 1, and no more than the server takes of one request."""
        drawn = self.rng.lognormal(math.log(mean) - self.mix.scatter**2 / 2, self.mix.scatter)
        return int(max(1, min(drawn, self.server.longest // 2)))

    def _arriving(self) -> Iterator[Event]:
        for _ in range(self.rng.poisson(self.mix.arrivals)):
            prompt, prefix, shared = self._length(self.mix.prompt), int(self.rng.integers(self.mix.prefixes)), 0
            if self.rng.random() < self.mix.sharing:
                shared = min(prompt, 16 * (1 + prefix))
            self.waiting.append(Event("admit", (self.made,), prompt, prefix, shared))
            self.ends[self.made] = prompt + self._length(self.mix.output)
            self.made += 1
        yield from ()

    def _admitting(self) -> Iterator[Event]:
        while (self.waiting or not self.server.running()) and len(self.server.running()) < self.server.most:
            if not self.waiting:
                yield from self._arriving()
                continue
            if not self.server.takes(self.waiting[0].tokens):
                if self.server.running():
                    yield Event("pressure", (self.server.running()[0],), self.waiting[0].tokens)
                return
            yield self.waiting.pop(0)

    def _stepping(self) -> Iterator[Event]:
        numbers = tuple(self.server.running())
        while numbers and not self.server.fits(numbers):
            yield Event("pressure", numbers[-1:], self.server.longest)
            yield Event("drop", numbers[-1:])  # preempted: the youngest goes
            numbers = numbers[:-1]
        if numbers:
            yield Event("step", numbers)
        for number in numbers:
            done = self.server.tokens(number) >= self.ends[number]
            cancelled = self.rng.random() < self.mix.cancelled / self.mix.output
            if done or self.rng.random() < self.mix.looks / len(numbers):
                yield Event("look", (number,))
            if done or cancelled:
                yield Event("drop", (number,))


def without(events: Sequence[Event], goes: Callable[[int], bool]) -> list[Event]:
    """The events without those of some requests."""
    kept = []
    for event in events:
        numbers = tuple(number for number in event.numbers if not goes(number))
        if numbers:
            kept.append(event._replace(numbers=numbers))
    return kept


def prefilled(events: Sequence[Event]) -> list[Event]:
    """The same with the tokens that come one by one in the prompts, so that there are no steps."""
    stepped = Counter(number for event in events if event.kind == "step" for number in event.numbers)
    kept = []
    for event in events:
        if event.kind == "admit":
            kept.append(event._replace(tokens=event.tokens + stepped[event.numbers[0]]))
        elif event.kind != "step":
            kept.append(event)
    return kept


def brief(events: Sequence[Event]) -> list[Event]:
    """The same with a token a request."""
    return [event._replace(tokens=1, shared=0) if event.kind == "admit" else event for event in events]
