"""Helpers for tests of a search: results of units, and an in-process worker."""

from collections.abc import Callable

import pytest

from kvref_conformance.calls.messages import CallError, CallReply, CallRequest, Exchange
from kvref_conformance.exceptions import ClauseViolation
from kvref_conformance.fuzz.campaign import Campaign, CampaignListener
from kvref_conformance.fuzz.corpus import CampaignRun
from kvref_conformance.fuzz.findings import FuzzFailure
from kvref_conformance.fuzz.seed_scheduler import SeedScheduler
from kvref_conformance.fuzz.work_unit import UnitFailure, UnitResult, WorkUnit
from kvref_conformance.results import CheckResult


def exchange(number, op, raised=""):
    return Exchange(CallRequest(number, op, None, {}), CallReply(error=CallError(raised, "no")) if raised else CallReply(3))


def seen(seed, *calls, family="paged", clause="PAGED-07", states=(), transitions=()):
    found = None
    if calls:
        call_trace = [exchange(number, call.rstrip("!"), "X" * call.endswith("!")) for number, call in enumerate(calls, 1)]
        found = FuzzFailure(clause, call_trace, ClauseViolation("", "", "", clause))
    return UnitResult(WorkUnit(family, "calls", seed), 5, 100, frozenset(states), frozenset(transitions), found)


def short(seed, *shape, clause="PAGED-07"):
    return UnitFailure(WorkUnit("paged", "calls", seed), clause, shape, CheckResult("any", "failed"))


def kept(failures, failed):
    """A shrunk failure whose trace was written."""
    known = failures.add_shrunk(failed)
    known.trace = "a file"
    return known


class Here:
    """An in-process worker with a judge, or with a function in its place, that runs a limited number of units."""

    count = 1

    def __init__(self, most, judge=None, answer: Callable | None = None):
        self.judge, self.answer, self.most, self.asked, self.waiting = judge, answer, most, [], []

    @property
    def idle(self):
        return 1 - len(self.waiting)

    @property
    def under_way(self):
        return len(self.waiting)

    def ask(self, about, work, *arguments):
        self.asked.append((work.__name__, *arguments))
        self.waiting.append((about, work, arguments))

    def next(self, seconds):
        if len(self.asked) > self.most:
            raise KeyboardInterrupt
        if not self.waiting:
            return None
        about, work, arguments = self.waiting.pop()
        return about, self.answer(work, *arguments) if self.answer else work(self.judge, *arguments)


def explored(team, corpus, families=("blocks", "buffers", "contiguous"), seed=0, **listener):
    """Run a search; return it and all units that it requested."""
    scheduler = SeedScheduler(list(families), [], [], seed)
    campaign = Campaign(team, corpus, scheduler, CampaignRun("now", seed, 1), CampaignListener(**listener))
    with pytest.raises(KeyboardInterrupt):
        campaign.run_for(1000.0)
    return campaign
