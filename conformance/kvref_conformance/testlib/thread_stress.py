"""Concurrent calls: runs the same work in several threads, with frequent thread switches."""

import sys
from collections.abc import Callable, Iterable, Sequence
from threading import Barrier, Thread
from time import monotonic
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.drivers.resource_limits import TIMEOUT
from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.testlib.assertions import assert_equal, assert_same

NUM_THREADS = 4
STRESS_SECONDS = 0.3  # how long threads repeat their calls
SWITCH_INTERVAL = 1e-5  # Python's switch interval in seconds; the default is 5e-3


def require_threads(subject: Subject) -> None:
    """Raise NotOffered if the implementation is called by one thread at a time."""
    subject.require_same_process("calls from several threads")
    if not subject.limits.switch(subject.family, "threads"):
        raise NotOffered("calls from several threads, where its limits say threads: false")


def run_in_threads(subject: Subject, work: Callable[[int, np.random.Generator], None]) -> None:
    """Run work(number, rng) in THREADS threads, each with its own random generator.

    Raises ClauseViolation if a thread raises an error or does not end; NotOffered if a thread raises it, if the limits say that
    there is one thread, or if the implementation is reached through a pipe, which serializes calls.
    """
    require_threads(subject)
    start, errors, missing = Barrier(NUM_THREADS), list[str](), list[NotOffered]()
    rngs = subject.rng.spawn(NUM_THREADS)
    limit = max(subject.patience.seconds, TIMEOUT)  # at least TIMEOUT, because the threads make many calls

    def run(number: int) -> None:
        start.wait()
        try:
            work(number, rngs[number])
        except NotOffered as lacking:
            missing.append(lacking)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [Thread(target=run, args=(number,), daemon=True) for number in range(NUM_THREADS)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limit)
    finally:
        sys.setswitchinterval(before)
    if any(thread.is_alive() for thread in threads):
        raise ClauseViolation("the threads", f"all threads to end within {limit:g} s", "a thread that was still running")
    assert_equal(errors, [], "errors in the threads")
    if missing:
        raise missing[0]


Calls = Callable[[], Iterable[Any]]  # makes calls and returns arrays


def assert_threads_do_not_interfere(subject: Subject, calls: Sequence[Sequence[Calls]], what: str) -> None:
    """Raise ClauseViolation unless the calls of each thread return the same bits beside those of the others as they do alone.

    calls: for each thread, the same functions with different arrays, so that memory which the threads share shows. All threads
    repeat them for STRESS_SECONDS, and at least once, because on a busy machine a thread can start later than that. They are not
    recorded: recording takes longer than most calls, and would make races rare.
    """
    require_threads(subject)
    alone = [[[np.array(part) for part in call()] for call in each] for each in calls]
    ends, where = list[float](), f"{what} in one of {NUM_THREADS} threads, compared with the same calls alone"

    def repeat(thread: int, rng: np.random.Generator) -> None:
        ends.append(monotonic() + STRESS_SECONDS)
        is_over = False
        while not is_over:
            for call, wanted in zip(calls[thread], alone[thread], strict=True):
                for got, want in zip(call(), wanted, strict=True):
                    assert_same(np.asarray(got), want, where)
            is_over = monotonic() > ends[0]

    with subject.unrecorded_calls():
        run_in_threads(subject, repeat)
