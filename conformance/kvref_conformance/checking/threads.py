"""The same work in several threads at once, each with random numbers of its own, switched between as often as can be."""

import sys
from collections.abc import Callable
from threading import Barrier, Thread

import numpy as np

from kvref_conformance.checking.expect import equal
from kvref_conformance.conversation.drivers.guard import TIMEOUT
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.outcome import Broken, NotOffered

THREADS = 4
BETWEEN_SWITCHES = 1e-5  # seconds that Python lets a thread run, of 5e-3 by default


def in_threads(subject: Subject, work: Callable[[int, np.random.Generator], None]) -> None:
    """Run work(number, rng) in THREADS threads. Raises Broken for an error in one of them, or one that does not end.

    Raises NotOffered where a thread meets what is not offered, and where calls go through a pipe, one at a time.
    """
    subject.in_this_process("calls from several threads")
    start, errors, missing = Barrier(THREADS), list[str](), list[NotOffered]()
    rngs = subject.rng.spawn(THREADS)
    limit = max(subject.patience.seconds, TIMEOUT)  # for many calls, on a machine that may be busy: never less than for one

    def run(number: int) -> None:
        start.wait()
        try:
            work(number, rngs[number])
        except NotOffered as lacking:
            missing.append(lacking)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [Thread(target=run, args=(number,), daemon=True) for number in range(THREADS)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(BETWEEN_SWITCHES)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limit)
    finally:
        sys.setswitchinterval(before)
    if any(thread.is_alive() for thread in threads):
        raise Broken("the threads", f"an end within {limit:g} s", "none: a thread was still running")
    equal(errors, [], "errors in the threads")
    if missing:
        raise missing[0]
