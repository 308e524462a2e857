"""What a machine has found. Apart from the machines, for they take Hypothesis, which takes a while to import."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvref_conformance.conversation.drivers.guard import Patience
from kvref_conformance.conversation.exchange import Exchange
from kvref_conformance.interface import Implementation
from kvref_conformance.outcome import Broken, Hung

SHRINKING = 200  # runs after the first failure, for others to be found and all to be made simpler; calls are left out later


@dataclass(frozen=True)
class Finding:
    """A clause that some sequence of calls breaks, and the calls up to the one that shows it."""

    clause: str
    conversation: list[Exchange]
    broken: Broken


@dataclass
class Search:
    """One run of a machine over an implementation: what it has found so far, the shortest conversation a clause."""

    implementation: Implementation
    patience: Patience = field(default_factory=Patience)
    runs_after: int = SHRINKING  # the first failure
    findings: dict[str, Finding] = field(default_factory=dict)
    longest: list[Exchange] = field(default_factory=list)  # of the conversations without a failure
    runs_left: int | None = None  # counted down once something was found
    watchers: list[Any] = field(default_factory=list)  # of every request
    through: list[str] = field(default_factory=list)  # operations that were made of others

    begun: int = 0  # sequences
    tell: Callable[[int], None] = lambda begun: None  # of each, how many that makes

    def begin(self) -> bool:
        self.begun += 1
        self.tell(self.begun)
        if self.runs_left is not None:
            self.runs_left -= 1
        return self.runs_left is None or self.runs_left > 0

    def found(self, broken: Broken, conversation: list[Exchange]) -> None:
        if isinstance(broken, Hung):
            self.runs_left = 0  # each run more would take as long again
        elif self.runs_left is None:
            self.runs_left = self.runs_after
        known = self.findings.get(broken.clause)
        if known is None or size(conversation) < size(known.conversation):
            self.findings[broken.clause] = Finding(broken.clause, list(conversation), broken)


def size(conversation: list[Exchange]) -> tuple[int, int, int]:
    """Calls a person sees, all calls, numbers handed in."""
    shown = sum(not exchange.quiet for exchange in conversation)
    numbers = sum(np.size(value) for exchange in conversation for value in exchange.request.args.values())
    return shown, len(conversation), int(numbers)
