"""The findings of a state machine. In a module without Hypothesis, which is slow to import."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvref_conformance.calls.messages import Exchange
from kvref_conformance.drivers.resource_limits import CallTimeouts
from kvref_conformance.exceptions import CallTimeout, ClauseViolation
from kvref_conformance.implementation_api import Implementation

SHRINK_CALLS = 10_000  # calls after the first failure, to find further failures and shorter ones (traces/shrinking.py follows)
MIN_CALLS = 50  # a call sequence counts as at least this number of calls, for the time that Hypothesis takes to draw it


@dataclass(frozen=True)
class FuzzFailure:
    """A broken clause, and the calls up to the one that shows it."""

    clause: str
    call_trace: list[Exchange]
    violation: ClauseViolation


@dataclass
class Search:
    """One run of a state machine on an implementation.

    max_shrink_calls: number of calls after the first failure; calls_left: how many of those are left, None before a failure.
    findings: the shortest call trace per clause. longest: the longest call trace without a failure. watchers: see CallRecorder.
    through: the derived operations that were used. begun: number of call sequences so far; on_begin: called with this number.
    """

    implementation: Implementation
    patience: CallTimeouts = field(default_factory=CallTimeouts)
    max_shrink_calls: int = SHRINK_CALLS
    findings: dict[str, FuzzFailure] = field(default_factory=dict)
    longest: list[Exchange] = field(default_factory=list)
    calls_left: int | None = None
    watchers: list[Any] = field(default_factory=list)
    through: list[str] = field(default_factory=list)

    begun: int = 0
    on_begin: Callable[[int], None] = lambda begun: None

    def begin_sequence(self) -> bool:
        """Count a new call sequence. Returns whether it should make calls."""
        self.begun += 1
        self.on_begin(self.begun)
        return self.calls_left is None or self.calls_left > 0

    def end_sequence(self, call_trace: list[Exchange]) -> None:
        """Count the calls of a call sequence, if there was a failure before or in it."""
        if self.calls_left is not None:
            self.calls_left -= max(len(call_trace), MIN_CALLS)

    def add_failure(self, violation: ClauseViolation, call_trace: list[Exchange]) -> None:
        """Add a failure, unless a shorter call trace is known for its clause."""
        if isinstance(violation, CallTimeout):
            self.calls_left = 0  # each further run would hang as long
        elif self.calls_left is None:
            self.calls_left = self.max_shrink_calls
        known = self.findings.get(violation.clause)
        if known is None or trace_size(call_trace) < trace_size(known.call_trace):
            self.findings[violation.clause] = FuzzFailure(violation.clause, list(call_trace), violation)


def trace_size(call_trace: list[Exchange]) -> tuple[int, int, int]:
    """The size of a call trace, for comparisons: printed calls, then all calls, then numbers in arguments."""
    shown = sum(not exchange.quiet for exchange in call_trace)
    numbers = sum(np.size(value) for exchange in call_trace for value in exchange.request.args.values())
    return shown, len(call_trace), int(numbers)
