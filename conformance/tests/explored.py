"""Helpers for tests of a search: results of units, and an in-process worker."""

from collections.abc import Callable

import pytest

from kvref_conformance.conversation.exchange import Error, Exchange, Reply, Request
from kvref_conformance.exploring.corpus import Run
from kvref_conformance.exploring.run import Exploring, Listener
from kvref_conformance.exploring.seen import Failed, Seen
from kvref_conformance.exploring.steering import Steering
from kvref_conformance.exploring.units import Unit
from kvref_conformance.outcome import Broken, Outcome
from kvref_conformance.searching.found import Finding


def exchange(number, op, raised=""):
    return Exchange(Request(number, op, None, {}), Reply(error=Error(raised, "no")) if raised else Reply(3))


def seen(seed, *calls, family="paged", clause="PAGED-07", states=(), transitions=()):
    found = None
    if calls:
        conversation = [exchange(number, call.rstrip("!"), "X" * call.endswith("!")) for number, call in enumerate(calls, 1)]
        found = Finding(clause, conversation, Broken("", "", "", clause))
    return Seen(Unit(family, "calls", seed), 5, 100, frozenset(states), frozenset(transitions), found)


def short(seed, *shape, clause="PAGED-07"):
    return Failed(Unit("paged", "calls", seed), clause, shape, Outcome("any", "failed"))


def kept(failures, failed):
    """A shrunk failure whose trace was written."""
    known = failures.short(failed)
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
    steering = Steering(list(families), [], [], seed)
    exploring = Exploring(team, corpus, steering, Run("now", seed, 1), Listener(**listener))
    with pytest.raises(KeyboardInterrupt):
        exploring.go(1000.0)
    return exploring
