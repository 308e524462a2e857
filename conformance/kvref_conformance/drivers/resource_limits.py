"""Limits for code that may misbehave: time per call, memory per check.

The time limit needs POSIX signals and the main thread, and works for calls that return to the Python interpreter now and then.
The memory limit needs Linux. For an implementation that hangs or crashes inside a library, use `kvref check --isolate`.
"""

import gc
import math
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from kvref_conformance.drivers.processor_wait import total_wait

TIMEOUT = 10.0  # seconds per call (default)
SERVER_TIMEOUT = 60.0  # seconds per call to a server, which may be serving other clients
TIMEOUT_AFTER_HANG = 1.0  # seconds per call of an operation that hung before
ALARM_INTERVAL = 1.0  # seconds until the alarm repeats, in case Python or the implementation swallowed it
TIMER_SLACK = 1e-3  # minimum seconds to an alarm: an alarm in the code of `time_limit` itself is ignored
SHORTEST_TIMER = 1e-6  # seconds to the alarm of a timer that has expired meanwhile; 0 would disable it
NO_TIMEOUT = 10.0**6  # seconds; for an outer block that only sets up the timer for the limits inside it
MEMORY_LIMIT = 4 * 2**30  # bytes that a check may allocate in addition to what the process has
SLOW_MEMORY_LIMIT = 16 * 2**30  # the same for checks marked slow, which use gigabytes


class TimedOut(BaseException):
    """A call exceeded its time limit. Not an Exception, so that `except Exception` in an implementation does not catch it."""

    got = "none: the call was still running"


class CallTimeouts:
    """The time limit per call. It is shorter for an operation that hung before, so that a run with a bad operation ends soon."""

    def __init__(self, seconds: float = TIMEOUT) -> None:
        self.seconds = seconds
        self.hung_operations: set[str] = set()

    def limit(self, op: str) -> float:
        return min(self.seconds, TIMEOUT_AFTER_HANG) if op in self.hung_operations else self.seconds


class time_limit:
    """Raise TimedOut inside the block after the given number of seconds, less the time that the process waited for a processor.

    A timer that was running before (for example of pytest-timeout) is stopped and restored afterwards with its remaining time;
    if that has passed, it fires at once. Do not use this class in a generator-based context manager: the alarm could interrupt
    the generator and leave it suspended.

    Installing and restoring the timer takes as long as a short call. Only the outermost block does it; nested blocks only set
    the time of the alarm. Code that makes many calls is therefore surrounded by a block of NO_TIMEOUT seconds.
    """

    _innermost: "time_limit | None" = None
    _alarm = 0.0  # time.monotonic() of the next alarm

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._limits = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> None:
        if not self._limits:
            return
        self._outer = time_limit._innermost
        if self._outer is None:
            handler = signal.getsignal(signal.SIGALRM)
            self._limits = handler is not None  # None: the handler was not installed from Python and could not be restored
            if not self._limits:
                return
            self._handler = handler
            self._timer = signal.setitimer(signal.ITIMER_REAL, 0)  # stopped first, so that its alarm never reaches our handler
            self._since = time.monotonic()
            signal.signal(signal.SIGALRM, _on_alarm)
            time_limit._alarm = math.inf
        self.deadline, self._waited = time.monotonic() + self.seconds, total_wait()
        time_limit._innermost = self
        self.arm()

    def __exit__(self, *_: object) -> None:
        try:
            self._leave()
        except BaseException:  # Ctrl-C
            self._leave()
            raise

    def arm(self) -> None:
        """Set the timer, unless an earlier alarm is pending: its handler sets the timer again."""
        if self.deadline < time_limit._alarm:
            time_limit._alarm = self.deadline
            signal.setitimer(signal.ITIMER_REAL, max(self.deadline - time.monotonic(), TIMER_SLACK), ALARM_INTERVAL)

    def extend(self) -> None:
        """Add to the deadline the time that the process has waited for a processor since the last call."""
        waited = total_wait()
        self.deadline += max(0.0, waited - self._waited)
        self._waited = waited

    def _leave(self) -> None:
        if not self._limits:
            return
        time_limit._innermost = self._outer
        if self._outer is not None:
            self._outer.arm()
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._handler)
        left, interval = self._timer
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - self._since), SHORTEST_TIMER), interval)


# Code in which the alarm must not raise: `time_limit` itself, which would be left half done, and code in which Python ignores
# exceptions (callbacks of the garbage collector such as Hypothesis's, callbacks of weak references, and __del__). The alarm
# repeats, so the next one raises.
_NOT_IN = {
    each.__code__ for each in (time_limit.__enter__, time_limit.__exit__, time_limit.arm, time_limit.extend, time_limit._leave)
}
_WEAK: tuple[Any, ...] = (weakref.WeakSet(), weakref.WeakKeyDictionary(), weakref.WeakValueDictionary())
_NOT_IN |= {each._remove.__code__ for each in _WEAK}
_NOT_IN.add(weakref.finalize.__call__.__code__)  # runs whenever an object is collected
_NOT_CALLED = ("gc_callback", "__del__")


def _on_alarm(signum: int, frame: FrameType | None) -> None:
    time_limit._alarm = time.monotonic() + ALARM_INTERVAL
    while frame is not None:
        if frame.f_code in _NOT_IN or frame.f_code.co_name in _NOT_CALLED:
            return
        frame = frame.f_back
    if innermost := time_limit._innermost:
        innermost.extend()
        if innermost.deadline <= time.monotonic():
            raise TimedOut
        time_limit._alarm = math.inf
        innermost.arm()


@contextmanager
def memory_limit(extra: int = MEMORY_LIMIT) -> Iterator[None]:
    """Make allocations beyond `extra` bytes inside the block fail with MemoryError, before the system runs out of memory."""
    used = data_bytes()
    if used is None:
        yield
        return
    import resource  # not available on every system, but wherever data_bytes returns a number

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (strictest_limit(used + extra, soft, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def strictest_limit(limit: int, *others: int) -> int:
    """The smallest of the limits, of which `others` may be RLIM_INFINITY. A limit that the user has set is never raised."""
    import resource

    return min([limit, *(other for other in others if other != resource.RLIM_INFINITY)])


def collect_rarely() -> None:
    """Make the cyclic garbage collector run less often. Call traces contain no cycles, and a run takes a tenth less time."""
    gc.freeze()
    gc.set_threshold(10_000)


def data_bytes() -> int | None:
    """The size of the process's data segment (VmData) in bytes, or None if the system does not report it."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")), None)
