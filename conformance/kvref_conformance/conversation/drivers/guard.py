"""Limits around code that may misbehave: time for a call, memory for a check.

They work where the system has them (POSIX signals in the main thread, Linux data limits) and for calls that return to Python now
and then; what hangs or dies inside a library takes `kvref check --isolate`.
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

TIMEOUT = 10.0  # seconds a call may take, unless asked otherwise
SERVED_WITHIN = 60.0  # the same of a call to a server, which may have others to serve
ONCE_HUNG = 1.0  # seconds for an operation that took too long before
AGAIN = 1.0  # seconds to the next alarm, should Python or the implementation have swallowed one
SETTLED = 1e-3  # seconds in which the limit's own code has come to its end, where no alarm counts
SOON = 1e-6  # seconds to the alarm of a timer whose time has passed; 0 would switch it off
BOUNDLESS = 10.0**6  # seconds, for what limits inside it
MEMORY = 4 * 2**30  # bytes a check may allocate beyond what the process has
SLOW_MEMORY = 16 * 2**30  # the same for a check that is marked slow: it is about gigabytes


class TimedOut(BaseException):
    """A call took longer than it may. Not an Exception, so that no implementation swallows it by accident."""

    got = "none: it was still running"


class Patience:
    """How long a call may take: less once its operation has hung, so that a run with one bad operation comes to its end."""

    def __init__(self, seconds: float = TIMEOUT) -> None:
        self.seconds = seconds
        self.hung: set[str] = set()

    def limit(self, op: str) -> float:
        return min(self.seconds, ONCE_HUNG) if op in self.hung else self.seconds


class time_limit:
    """Raise TimedOut inside the block after so many seconds.

    A timer that somebody else had running, pytest-timeout's say, goes on afterwards with the time that it had left; where that
    has passed meanwhile, it goes off at once. To be used where the call is, and not in a generator, which an alarm may leave
    standing in the middle.

    To set a timer and give it back takes as long as a short call. A limit inside another only says when, and what surrounds many
    calls has one of its own for them (BOUNDLESS).
    """

    _innermost: "time_limit | None" = None
    _alarm = 0.0  # when the next one comes

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._limits = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> None:
        if not self._limits:
            return
        self._outer = time_limit._innermost
        if self._outer is None:
            handler = signal.getsignal(signal.SIGALRM)
            self._limits = handler is not None  # None: it is not Python's, and could not be given back
            if not self._limits:
                return
            self._handler = handler
            self._timer = signal.setitimer(signal.ITIMER_REAL, 0)  # first, so that its alarm is never taken for ours
            self._since = time.monotonic()
            signal.signal(signal.SIGALRM, _stop)
            time_limit._alarm = math.inf
        self.due = time.monotonic() + self.seconds
        time_limit._innermost = self
        self.arm()

    def __exit__(self, *_: object) -> None:
        try:
            self._leave()
        except BaseException:  # Ctrl-C
            self._leave()
            raise

    def arm(self) -> None:
        """See that an alarm comes when time is up. One that comes before is put off then."""
        if self.due < time_limit._alarm:
            time_limit._alarm = self.due
            signal.setitimer(signal.ITIMER_REAL, max(self.due - time.monotonic(), SETTLED), AGAIN)

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
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - self._since), SOON), interval)


# Where an alarm may not be turned into an exception: while the limit itself comes and goes, for that would leave it half done,
# and where Python ignores exceptions: in a callback of the garbage collector, such as Hypothesis's, in what a weak collection
# does when an object is gone, and in __del__. The next alarm will do.
_NOT_IN = {each.__code__ for each in (time_limit.__enter__, time_limit.__exit__, time_limit.arm, time_limit._leave)}
_WEAK: tuple[Any, ...] = (weakref.WeakSet(), weakref.WeakKeyDictionary(), weakref.WeakValueDictionary())
_NOT_IN |= {each._remove.__code__ for each in _WEAK}
_NOT_IN.add(weakref.finalize.__call__.__code__)  # which runs wherever Python happens to collect
_NOT_CALLED = ("gc_callback", "__del__")


def _stop(signum: int, frame: FrameType | None) -> None:
    time_limit._alarm = time.monotonic() + AGAIN
    while frame is not None:
        if frame.f_code in _NOT_IN or frame.f_code.co_name in _NOT_CALLED:
            return
        frame = frame.f_back
    if innermost := time_limit._innermost:
        if innermost.due <= time.monotonic():
            raise TimedOut
        time_limit._alarm = math.inf
        innermost.arm()


@contextmanager
def memory_limit(extra: int = MEMORY) -> Iterator[None]:
    """Let allocations inside the block fail with MemoryError, instead of taking the machine down."""
    used = data_bytes()
    if used is None:
        yield
        return
    import resource  # not on every system: data_bytes says

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (stricter(used + extra, soft, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def stricter(limit: int, *others: int) -> int:
    """The least of some limits, of which one may be infinity: what the user has set is not for us to raise."""
    import resource

    return min([limit, *(other for other in others if other != resource.RLIM_INFINITY)])


def collect_rarely() -> None:
    """Look for circles of garbage less often than at every 700th object: a conversation has none; a run is a tenth shorter."""
    gc.freeze()
    gc.set_threshold(10_000)


def data_bytes() -> int | None:
    """The process's private memory in bytes, or None where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")), None)
