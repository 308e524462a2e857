"""Counters of a run under load, in constant memory."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

BUCKET_WIDTH = math.log(1.05)  # logarithmic bin width of latencies: a percentile is accurate within 3 %
MIN_COMPARED = 4  # wrong and right answers, at least, before the requests beside them are compared
MAX_BESIDE_RIGHT = 50.0  # percent of the right answers beside which a suspect was in flight
MAX_POINTS = 400  # maximum number of moments in a timeline


@dataclass
class Latencies:
    """A histogram of latencies in seconds."""

    counts: Counter[int] = field(default_factory=Counter)

    def add(self, seconds: float) -> None:
        self.counts[round(math.log(max(seconds, 1e-6)) / BUCKET_WIDTH)] += 1

    def percentile(self, percent: float) -> float | None:
        """Return the seconds that `percent` percent do not exceed; None if there are none."""
        left = self.counts.total() * percent / 100
        for step in sorted(self.counts):
            left -= self.counts[step]
            if left <= 0:
                return math.exp(step * BUCKET_WIDTH)
        return None

    def document(self) -> dict[str, float | None]:
        return {f"p{percent:g}": self.percentile(percent) for percent in (50, 90, 99)}


@dataclass
class TimelinePoint:
    """Counts of one span of time."""

    tokens: int = 0
    wrong: int = 0
    failed: int = 0
    first: Latencies = field(default_factory=Latencies)

    def __add__(self, other: "TimelinePoint") -> "TimelinePoint":
        first = Latencies(self.first.counts + other.first.counts)
        return TimelinePoint(self.tokens + other.tokens, self.wrong + other.wrong, self.failed + other.failed, first)


@dataclass
class Timeline:
    """Moments of `width` seconds each. If there are more than MAX_POINTS, each two neighbors are joined."""

    width: float = 1.0
    moments: list[TimelinePoint] = field(default_factory=list)

    def at(self, seconds: float) -> TimelinePoint:
        while seconds >= self.width * MAX_POINTS:
            pairs = zip(self.moments[::2], [*self.moments[1::2], TimelinePoint()], strict=False)
            self.moments, self.width = [first + second for first, second in pairs], 2 * self.width
        while len(self.moments) <= int(seconds / self.width):
            self.moments.append(TimelinePoint())
        return self.moments[int(seconds / self.width)]


@dataclass
class WrongAnswer:
    """A request answered with wrong tokens. tokens: their number. place: index of the first in the answer. said: from there on.

    prompt: number of its tokens. beside: the kinds of the requests in flight at the same time. finding: the request that the
    wrong tokens belong to.
    """

    request: str
    kind: str
    prompt: int
    tokens: int
    place: int
    expected: list[int | None]
    said: list[int]
    beside: list[str] = field(default_factory=list)
    finding: str = ""


@dataclass
class ServerStatistics:
    """refused: replies without room (HTTP 429, 503). failed: number of other replies that are no completion, by kind.

    examples: the first of each kind. prompt_tokens, cached_tokens: if the server reports both. wrong: some of the wrong answers.
    beside_right, beside_wrong: beside how many right and wrong answers a request of a kind was in flight.
    """

    seconds: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)
    tokens_checked: int = 0
    uncertain: int = 0
    wrong_tokens: int = 0
    wrong_requests: int = 0
    wrong: list[WrongAnswer] = field(default_factory=list)
    beside_right: Counter[str] = field(default_factory=Counter)
    beside_wrong: Counter[str] = field(default_factory=Counter)
    right_requests: int = 0
    refused: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    first: Latencies = field(default_factory=Latencies)
    total: Latencies = field(default_factory=Latencies)
    timeline: Timeline = field(default_factory=Timeline)
    open: list[float] = field(default_factory=list)  # ages in seconds of the requests unanswered at the end
    gone: bool = False  # the run ended because the server no longer answers

    @property
    def rate(self) -> float:
        return self.tokens_checked / self.seconds if self.seconds else 0.0

    @property
    def suspects(self) -> dict[str, float]:
        """The kinds of requests that were in flight beside every wrong answer, with the percentage of right answers beside them.

        Only kinds that were beside at most MAX_BESIDE_RIGHT percent of the right answers, if there are enough answers of both.
        """
        if min(self.wrong_requests, self.right_requests) < MIN_COMPARED:
            return {}
        always = [kind for kind, count in self.beside_wrong.items() if count == self.wrong_requests]
        shares = {kind: 100 * self.beside_right[kind] / self.right_requests for kind in always}
        return {kind: share for kind, share in shares.items() if share <= MAX_BESIDE_RIGHT}

    def document(self) -> dict[str, Any]:
        """Return the figures as plain data."""
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
            "beside_every_wrong_answer": self.suspects,
            "wrong": [vars(each) for each in self.wrong],
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "first_token": self.first.document(),
            "total": self.total.document(),
            "timeline": {"seconds_each": self.timeline.width, "moments": moments},
        }
