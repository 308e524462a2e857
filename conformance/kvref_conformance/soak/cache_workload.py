"""Requests of a server: their arrivals, their lengths, their shared prefixes and their cancellations.

Lengths are lognormal, with the means that Kwon et al. (Efficient Memory Management for Large Language Model Serving with
PagedAttention, SOSP 2023) give for ShareGPT: 161 tokens of prompt, 338 of output. Arrivals are Poisson, as there. The
scatter of lengths and the shares of shared prefixes and cancellations are our own choice.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np


class WorkloadEvent(NamedTuple):
    """admit: a request of `tokens` tokens, of which the first `shared` are those of a prefix. step: one more token of each.

    look: every token of one request is compared. drop: its sequence is dropped. pressure: `tokens` more tokens do not fit.
    """

    kind: str
    numbers: tuple[int, ...]
    tokens: int = 0
    prefix: int = 0
    shared: int = 0


class SoakDriver(Protocol):
    """A serving cache. The server computes what fits without calling the cache. Requests are identified by numbers."""

    max_sequences: int  # maximum number of concurrent requests
    max_tokens: int  # maximum tokens of a request

    def running_requests(self) -> Sequence[int]: ...
    def fits(self, numbers: Sequence[int], tokens: int = 1) -> bool: ...
    def allows_length(self, tokens: int) -> bool: ...
    def tokens(self, number: int) -> int: ...
    def run_event(self, event: WorkloadEvent) -> int: ...


@dataclass(frozen=True)
class WorkloadMix:
    """arrivals: requests per step. Lengths in tokens; scatter: sigma of their logarithms. Shares of all requests or steps."""

    arrivals: float = 0.25
    prompt: float = 161.0
    output: float = 338.0
    scatter: float = 1.0
    prefixes: int = 4
    sharing: float = 0.3
    cancelled: float = 0.1
    reads: float = 0.05


@dataclass
class Workload:
    """The events of one server, drawn on demand: the same seed gives the same events, whatever the cache does."""

    server: SoakDriver
    rng: np.random.Generator
    mix: WorkloadMix = field(default_factory=WorkloadMix)
    num_made: int = 0
    ends: dict[int, int] = field(default_factory=dict)  # by request: its final number of tokens
    queue: list[WorkloadEvent] = field(default_factory=list)

    def events(self) -> Iterator[WorkloadEvent]:
        while True:
            yield from self._arriving()
            yield from self._admitting()
            yield from self._stepping()

    def _length(self, mean: float) -> int:
        """Return a length of at least 1 and at most the server's limit per request."""
        drawn = self.rng.lognormal(math.log(mean) - self.mix.scatter**2 / 2, self.mix.scatter)
        return int(max(1, min(drawn, self.server.max_tokens // 2)))

    def _arriving(self) -> Iterator[WorkloadEvent]:
        for _ in range(self.rng.poisson(self.mix.arrivals)):
            prompt, prefix, shared = self._length(self.mix.prompt), int(self.rng.integers(self.mix.prefixes)), 0
            if self.rng.random() < self.mix.sharing:
                shared = min(prompt, 16 * (1 + prefix))
            self.queue.append(WorkloadEvent("admit", (self.num_made,), prompt, prefix, shared))
            self.ends[self.num_made] = prompt + self._length(self.mix.output)
            self.num_made += 1
        yield from ()

    def _admitting(self) -> Iterator[WorkloadEvent]:
        while (self.queue or not self.server.running_requests()) and len(
            self.server.running_requests()
        ) < self.server.max_sequences:
            if not self.queue:
                yield from self._arriving()
                continue
            if not self.server.allows_length(self.queue[0].tokens):
                if self.server.running_requests():
                    yield WorkloadEvent("pressure", (self.server.running_requests()[0],), self.queue[0].tokens)
                return
            yield self.queue.pop(0)

    def _stepping(self) -> Iterator[WorkloadEvent]:
        numbers = tuple(self.server.running_requests())
        while numbers and not self.server.fits(numbers):
            yield WorkloadEvent("pressure", numbers[-1:], self.server.max_tokens)
            yield WorkloadEvent("drop", numbers[-1:])  # preempt the youngest
            numbers = numbers[:-1]
        if numbers:
            yield WorkloadEvent("step", numbers)
        for number in numbers:
            done = self.server.tokens(number) >= self.ends[number]
            cancelled = self.rng.random() < self.mix.cancelled / self.mix.output
            if done or self.rng.random() < self.mix.reads / len(numbers):
                yield WorkloadEvent("look", (number,))
            if done or cancelled:
                yield WorkloadEvent("drop", (number,))


def without_requests(events: Sequence[WorkloadEvent], goes: Callable[[int], bool]) -> list[WorkloadEvent]:
    """Return the events without those of some requests."""
    kept = []
    for event in events:
        numbers = tuple(number for number in event.numbers if not goes(number))
        if numbers:
            kept.append(event._replace(numbers=numbers))
    return kept


def merge_steps_into_prompts(events: Sequence[WorkloadEvent]) -> list[WorkloadEvent]:
    """Return the events with the tokens of the steps moved into the prompts."""
    stepped = Counter(number for event in events if event.kind == "step" for number in event.numbers)
    kept = []
    for event in events:
        if event.kind == "admit":
            kept.append(event._replace(tokens=event.tokens + stepped[event.numbers[0]]))
        elif event.kind != "step":
            kept.append(event)
    return kept


def one_token_per_request(events: Sequence[WorkloadEvent]) -> list[WorkloadEvent]:
    """Return the events with one token per request."""
    return [event._replace(tokens=1, shared=0) if event.kind == "admit" else event for event in events]
