"""Runs a workload against one family, and shortens a failure to a minimal reproducer."""

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from kvref_conformance.calls.messages import Exchange, to_call_error
from kvref_conformance.calls.source_location import raised_at
from kvref_conformance.calls.subject import Subject
from kvref_conformance.drivers.resource_limits import SLOW_MEMORY_LIMIT, memory_limit
from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.runner.check_runner import CheckRunner
from kvref_conformance.soak.cache_workload import (
    ROOM_ERRORS,
    SoakDriver,
    Workload,
    WorkloadEvent,
    merge_steps_into_prompts,
    one_token_per_request,
    without_requests,
)
from kvref_conformance.soak.drivers import make_driver
from kvref_conformance.traces.shrinking import SHRINK_SECONDS, ReplayResult

FULL_SIZES = 8, 128  # kv heads and head_dim of Llama 3, Mistral and Qwen 3
SMALL_SIZES = 1, 8  # kv heads and head_dim while a failure is shortened
REPORT_INTERVAL = 0.5  # seconds between two reports of progress
PAGE = 4096


@dataclass
class SoakStatistics:
    """Figures of one family. memory: pairs of seconds since the beginning and resident bytes.

    operations: the number of calls of each operation. not_exercised: operations that the cache has, and that were not called.
    refused: calls that raised because the cache was full.
    """

    family: str
    seconds: float = 0.0
    events: int = 0
    requests: int = 0
    refused: int = 0
    tokens_checked: int = 0
    memory: list[tuple[float, int]] = field(default_factory=list)
    not_offered: str = ""
    operations: dict[str, int] = field(default_factory=dict)
    not_exercised: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens_checked / self.seconds if self.seconds else 0.0

    @property
    def peak(self) -> int:
        return max((bytes for _, bytes in self.memory), default=0)

    def text(self) -> str:
        """Return the figures as JSON, for another process."""
        return json.dumps(asdict(self))


@dataclass
class SoakResult:
    figures: SoakStatistics
    failure: ReplayResult | None = None  # the failure, shortened


def a_serving_workload(subject: Subject) -> None:
    """The check whose name failures of a soak have."""


def run_soak(judge: CheckRunner, family: str, seed: int, seconds: float, most: float = math.inf) -> SoakResult:
    """Run a workload for `seconds`, for `most` events or until a check fails, then compare the tokens of all requests.

    `judge.progress` receives the figures as text.
    """
    figures, events = SoakStatistics(family), list[WorkloadEvent]()
    began = told = time.monotonic()
    violation: ClauseViolation | None = None
    with memory_limit(SLOW_MEMORY_LIMIT), np.errstate(all="ignore"):
        try:
            subject = judge.begin_family(family)
            served = make_driver(subject, family, *FULL_SIZES)
            workload = Workload(served, np.random.default_rng([seed, len(family)]))
            for event in workload.events_until(lambda: time.monotonic() - began > seconds or figures.events >= most):
                events.append(event)
                violation = run_event(served, event, figures)
                count_calls(subject, figures)
                subject.clear_trace()
                now = time.monotonic()
                figures.seconds = now - began
                if violation or now - told > REPORT_INTERVAL:
                    told = now
                    figures.memory.append((round(now - began, 1), resident_bytes()))
                    judge.progress(figures.text(), int(1000 * (now - began)), int(1000 * seconds))
                if violation:
                    break
            figures.memory.append((round(figures.seconds, 1), resident_bytes()))
        except NotOffered as missing:
            figures.not_offered = str(missing)
    return SoakResult(figures, shrink_workload(judge, family, events, violation) if violation else None)


def run_event(served: SoakDriver, event: WorkloadEvent, figures: SoakStatistics) -> ClauseViolation | None:
    """Run one event and return its failure, if any. Raises NotOffered."""
    try:
        figures.tokens_checked += served.run_event(event)
    except NotOffered:
        raise
    except ClauseViolation as violation:
        return violation
    except Exception as error:
        return ClauseViolation("", "no error", f"{type(error).__name__}: {to_call_error(error).message}", where=raised_at(error))
    figures.events += 1
    figures.requests += event.kind == "admit"
    return None


def count_calls(subject: Subject, figures: SoakStatistics) -> None:
    """Add the calls of the call trace to the figures."""
    for exchange in subject.call_trace:
        if exchange.request.on is not None:
            name = exchange.request.name
            figures.operations[name] = figures.operations.get(name, 0) + 1
            error = exchange.reply.error if exchange.reply else None
            figures.refused += error is not None and error.kind in ROOM_ERRORS


def shrink_workload(judge: CheckRunner, family: str, events: Sequence[WorkloadEvent], violation: ClauseViolation) -> ReplayResult:
    """Return the call trace with the fewest requests that still fails, found in SECONDS; an empty one if none is found.

    Try the smallest heads first, which cost the least, and prompts in place of single steps.
    """
    until = time.monotonic() + SHRINK_SECONDS
    numbers, named = sorted({number for event in events for number in event.numbers}), set(events[-1].numbers)
    suspects = [named | set(numbers[-last:] if last else ()) for last in (0, 2, 8, 64, len(numbers))]
    for sizes in (SMALL_SIZES, FULL_SIZES):

        def breaks(fewer: Sequence[WorkloadEvent], sizes: tuple[int, int] = sizes) -> bool:
            return time.monotonic() < until and replay_events(judge, family, sizes, fewer, until)[1] is not None

        for kept in suspects:
            some = without_requests(events, (set(numbers) - kept).__contains__)
            for candidate in (one_token_per_request(some), merge_steps_into_prompts(some), some):
                if breaks(candidate):
                    call_trace, seen = replay_events(
                        judge, family, sizes, minimize_events(candidate, breaks), until + SHRINK_SECONDS, keep=True
                    )
                    return ReplayResult(call_trace, seen or violation)
    return ReplayResult([], violation)


def minimize_events(events: list[WorkloadEvent], breaks: Callable[[Sequence[WorkloadEvent]], bool]) -> list[WorkloadEvent]:
    """Remove requests, half of them at a time and then fewer, and then single events."""
    numbers = sorted({number for event in events for number in event.numbers})
    size = len(numbers) // 2
    while size:
        for start in range(0, len(numbers), size):
            gone = set(numbers[start : start + size])
            if breaks(fewer := without_requests(events, gone.__contains__)):
                events = fewer
        numbers = sorted({number for event in events for number in event.numbers})
        size = min(size // 2, len(numbers) // 2)
    size = len(events) // 2
    while size:
        for start in range(len(events) - 1 - size, -1, -size):
            if breaks(fewer := [*events[:start], *events[start + size :]]):
                events = fewer
        size //= 2
    return events


def replay_events(
    judge: CheckRunner, family: str, sizes: tuple[int, int], events: Iterable[WorkloadEvent], until: float, keep: bool = False
) -> tuple[list[Exchange], ClauseViolation | None]:
    """Run the events on a new server; return the call trace (empty unless `keep`) and the failure."""
    subject = judge.begin_family(family)
    served, figures = make_driver(subject, family, *sizes), SoakStatistics(family)
    for event in events:
        if violation := run_event(served, event, figures):
            return subject.call_trace, violation
        if not keep:
            subject.clear_trace()
        if time.monotonic() > until:
            break
    return [], None


def resident_bytes() -> int:
    """Return the resident bytes of this process, or 0 if the system does not report them."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE
    except OSError:
        return 0
