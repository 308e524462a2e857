"""What is counted under load, in as much memory after a week as after a minute."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

FINENESS = math.log(1.05)  # of latencies: a percentile is right within 3 %
POINTS = 400  # of time, at most


@dataclass
class Latencies:
    """Seconds, counted by how long they are."""

    counts: Counter[int] = field(default_factory=Counter)

    def add(self, seconds: float) -> None:
        self.counts[round(math.log(max(seconds, 1e-6)) / FINENESS)] += 1

    def percentile(self, percent: float) -> float | None:
        """Seconds that so many percent do not exceed; None of none."""
        left = self.counts.total() * percent / 100
        for step in sorted(self.counts):
            left -= self.counts[step]
            if left <= 0:
                return math.exp(step * FINENESS)
        return None

    def document(self) -> dict[str, float | None]:
        return {f"p{percent:g}": self.percentile(percent) for percent in (50, 90, 99)}


@dataclass
class Moment:
    """What came in a span of time."""

    tokens: int = 0
    wrong: int = 0
    failed: int = 0
    first: Latencies = field(default_factory=Latencies)

    def __add__(self, other: "Moment") -> "Moment":
        first = Latencies(self.first.counts + other.first.counts)
        return Moment(self.tokens + other.tokens, self.wrong + other.wrong, self.failed + other.failed, first)


@dataclass
class Timeline:
    """Moments of `width` seconds each: they are joined two by two where they become too many."""

    width: float = 1.0
    moments: list[Moment] = field(default_factory=list)

    def at(self, seconds: float) -> Moment:
        while seconds >= self.width * POINTS:
            pairs = zip(self.moments[::2], [*self.moments[1::2], Moment()], strict=False)
            self.moments, self.width = [first + second for first, second in pairs], 2 * self.width
        while len(self.moments) <= int(seconds / self.width):
            self.moments.append(Moment())
        return self.moments[int(seconds / self.width)]


@dataclass
class Wrong:
    """A request that was answered with wrong tokens, so many. place: of the first, behind the prompt. said: from there on.

    prompt: tokens in it. finding: whose the tokens were.
    """

    request: str
    kind: str
    prompt: int
    tokens: int
    place: int
    expected: list[int | None]
    said: list[int]
    finding: str = ""


@dataclass
class Figures:
    """refused: answers that there is no room now (HTTP 429, 503). failed: others that were no completion, by kind.

    examples: the first of each kind. prompt_tokens, cached_tokens: where the server tells both. wrong: some of the answers.
    """

    seconds: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)
    tokens_checked: int = 0
    uncertain: int = 0
    wrong_tokens: int = 0
    wrong_requests: int = 0
    wrong: list[Wrong] = field(default_factory=list)
    refused: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    first: Latencies = field(default_factory=Latencies)
    total: Latencies = field(default_factory=Latencies)
    timeline: Timeline = field(default_factory=Timeline)
    open: list[float] = field(default_factory=list)  # seconds for which requests had waited that were open at the end
    gone: bool = False  # it no longer answers, and the run ended for that

    @property
    def rate(self) -> float:
        return self.tokens_checked / self.seconds if self.seconds else 0.0

    def document(self) -> dict[str, Any]:
        """As plain data."""
        moments = [
            {"tokens": each.tokens, "wrong": each.wrong, "failed": each.failed, "first_token": each.first.document()}
            for each in self.timeline.moments
        ]
        return {
            "seconds": self.seconds,
            "tokens_checked": self.tokens_checked,
            "tokens_checked_a_second": self.rate,
            "uncertain": self.uncertain,
            "requests": dict(self.requests),
            "refused": self.refused,
            "failed": dict(self.failed),
            "examples": self.examples,
            "open": self.open,
            "gone": self.gone,
            "wrong_tokens": self.wrong_tokens,
            "wrong_requests": self.wrong_requests,
            "wrong": [vars(each) for each in self.wrong],
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "first_token": self.first.document(),
            "total": self.total.document(),
            "timeline": {"seconds_each": self.timeline.width, "moments": moments},
        }
