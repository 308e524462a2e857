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

# Events at random moments, with the range of their number of tokens. fork: request `numbers[1]` begins with the tokens of
# `numbers[0]`. truncate: the last tokens are removed, as after a rejected draft. remove: tokens in the middle are removed.
# release: all but the last tokens are released, as by a window. move: the sequence is saved, and loaded again.
EDITS = {"fork": (0, 1), "truncate": (1, 24), "remove": (1, 24), "release": (16, 256), "move": (0, 1), "pressure": (0, 1)}
ROOM_ERRORS = ("OutOfBlocks", "CapacityExceeded")
ADMITTED = 2  # the largest number of requests that are admitted between two steps


class WorkloadEvent(NamedTuple):
    """admit: a request of `tokens` tokens, of which the first `shared` are those of a prefix. step: one more token of each.

    look: every token of one request is compared. drop: its sequence is dropped. pressure: calls for which there is no room, with
    one more token of each of several requests, or with too many of one. The other kinds are EDITS; a server ignores an edit that
    it does not support.
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
    """arrivals: requests per step. Lengths in tokens; scatter: sigma of their logarithms. Shares of all requests or steps.

    backlog: requests that wait when the server starts, so that a short soak fills it too.
    """

    arrivals: float = 0.25
    prompt: float = 161.0
    output: float = 338.0
    scatter: float = 1.0
    prefixes: int = 4
    sharing: float = 0.3
    cancelled: float = 0.1
    reads: float = 0.2
    edits: float = 0.8
    backlog: int = 64


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
        self._arrive(self.mix.backlog)
        while True:
            self._arrive(self.rng.poisson(self.mix.arrivals))
            yield from self._admitting()
            yield from self._stepping()
            yield from self._editing()

    def events_until(self, is_over: Callable[[], bool]) -> Iterator[WorkloadEvent]:
        """The events until `is_over`, and then a look at each running request."""
        for event in self.events():
            if is_over():
                break
            yield event
        for number in list(self.server.running_requests()):
            yield WorkloadEvent("look", (number,))

    def _length(self, mean: float) -> int:
        """Return a length of at least 1 and at most the server's limit per request."""
        drawn = self.rng.lognormal(math.log(mean) - self.mix.scatter**2 / 2, self.mix.scatter)
        return int(max(1, min(drawn, self.server.max_tokens // 2)))

    def _arrive(self, count: int) -> None:
        for _ in range(count):
            prompt, prefix, shared = self._length(self.mix.prompt), int(self.rng.integers(self.mix.prefixes)), 0
            if self.rng.random() < self.mix.sharing:
                shared = min(prompt, 16 * (1 + prefix))
            self.queue.append(WorkloadEvent("admit", (self.num_made,), prompt, prefix, shared))
            self.ends[self.num_made] = prompt + self._length(self.mix.output)
            self.num_made += 1

    def _admitting(self) -> Iterator[WorkloadEvent]:
        while not self.queue and not self.server.running_requests():
            self._arrive(self.rng.poisson(self.mix.arrivals))
        for event in self.queue[:ADMITTED]:
            if len(self.server.running_requests()) < self.server.max_sequences and self.server.allows_length(event.tokens):
                yield self.queue.pop(0)

    def _stepping(self) -> Iterator[WorkloadEvent]:
        numbers = tuple(self.server.running_requests())
        while numbers and not self.server.fits(numbers):
            yield WorkloadEvent("pressure", numbers)
            running = set(self.server.running_requests())  # a derived call without room drops the sequences that it changed
            numbers = tuple(number for number in numbers if number in running)
            yield WorkloadEvent("look", numbers[-1:])
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

    def _editing(self) -> Iterator[WorkloadEvent]:
        numbers = tuple(self.server.running_requests())
        if numbers and self.rng.random() < self.mix.edits:
            kind, number = str(self.rng.choice(list(EDITS))), int(self.rng.choice(numbers))
            tokens = int(self.rng.integers(*EDITS[kind]))
            if kind == "fork":
                self.ends[self.num_made] = self.server.tokens(number) + self._length(self.mix.output)
                yield WorkloadEvent(kind, (number, self.num_made))
                self.num_made += 1
            else:
                yield WorkloadEvent(kind, (number,), tokens)


def without_requests(events: Sequence[WorkloadEvent], goes: Callable[[int], bool]) -> list[WorkloadEvent]:
    """Return the events without those of some requests."""
    kept = []
    for event in events:
        numbers = tuple(number for number in event.numbers if not goes(number))
        if numbers:
            kept.append(event._replace(numbers=numbers))
    return kept


def merge_steps_into_prompts(events: Sequence[WorkloadEvent]) -> list[WorkloadEvent]:
    """Return the events with the tokens of the steps moved into the prompts, for requests that are not edited."""
    edited = {number for event in events if event.kind in EDITS for number in event.numbers}
    stepped = Counter(number for event in events if event.kind == "step" for number in event.numbers if number not in edited)
    kept = []
    for event in events:
        numbers = tuple(number for number in event.numbers if number in edited)
        if event.kind == "admit":
            kept.append(event._replace(tokens=event.tokens + stepped[event.numbers[0]]))
        elif event.kind != "step" or numbers:
            kept.append(event._replace(numbers=numbers) if event.kind == "step" else event)
    return kept


def one_token_per_request(events: Sequence[WorkloadEvent]) -> list[WorkloadEvent]:
    """Return the events with one token per request."""
    return [event._replace(tokens=1, shared=0) if event.kind == "admit" else event for event in events]
