"""Concurrent calls: runs the same work in several threads, with frequent thread switches."""

import sys
from collections.abc import Callable
from threading import Barrier, Thread

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.drivers.resource_limits import TIMEOUT
from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.testlib.assertions import assert_equal

NUM_THREADS = 4
SWITCH_INTERVAL = 1e-5  # Python's switch interval in seconds; the default is 5e-3


def run_in_threads(subject: Subject, work: Callable[[int, np.random.Generator], None]) -> None:
    """Run work(number, rng) in THREADS threads, each with its own random generator.

    Raises ClauseViolation if a thread raises an error or does not end; NotOffered if a thread raises it, or if the implementation
    is reached through a pipe, which serializes calls.
    """
    subject.require_same_process("calls from several threads")
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
