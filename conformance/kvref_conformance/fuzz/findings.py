"""The findings of a state machine. In a module without Hypothesis, which is slow to import."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvref_conformance.calls.messages import Exchange
from kvref_conformance.drivers.resource_limits import Patience
from kvref_conformance.implementation_api import Implementation
from kvref_conformance.outcome import Broken, Hung

SHRINKING = 200  # call sequences after the first failure, to find further failures and shorter ones (traces/shrinking.py follows)


@dataclass(frozen=True)
class FuzzFailure:
    """A broken clause, and the calls up to the one that shows it."""

    clause: str
    conversation: list[Exchange]
    broken: Broken


@dataclass
class Search:
    """One run of a state machine on an implementation.

    runs_after: number of call sequences after the first failure; runs_left: how many of those are left, None before a failure.
    findings: the shortest call trace per clause. longest: the longest call trace without a failure. watchers: see CallRecorder.
    through: the derived operations that were used. begun: number of call sequences so far; tell: called with this number.
    """

    implementation: Implementation
    patience: Patience = field(default_factory=Patience)
    runs_after: int = SHRINKING
    findings: dict[str, FuzzFailure] = field(default_factory=dict)
    longest: list[Exchange] = field(default_factory=list)
    runs_left: int | None = None
    watchers: list[Any] = field(default_factory=list)
    through: list[str] = field(default_factory=list)

    begun: int = 0
    tell: Callable[[int], None] = lambda begun: None

    def begin(self) -> bool:
        """Count a new call sequence. Returns whether it should make calls."""
        self.begun += 1
        self.tell(self.begun)
        if self.runs_left is not None:
            self.runs_left -= 1
        return self.runs_left is None or self.runs_left > 0

    def found(self, broken: Broken, conversation: list[Exchange]) -> None:
        """Add a failure, unless a shorter call trace is known for its clause."""
        if isinstance(broken, Hung):
            self.runs_left = 0  # each further run would hang as long
        elif self.runs_left is None:
            self.runs_left = self.runs_after
        known = self.findings.get(broken.clause)
        if known is None or size(conversation) < size(known.conversation):
            self.findings[broken.clause] = FuzzFailure(broken.clause, list(conversation), broken)


def size(conversation: list[Exchange]) -> tuple[int, int, int]:
    """The size of a call trace, for comparisons: printed calls, then all calls, then numbers in arguments."""
    shown = sum(not exchange.quiet for exchange in conversation)
    numbers = sum(np.size(value) for exchange in conversation for value in exchange.request.args.values())
    return shown, len(conversation), int(numbers)
