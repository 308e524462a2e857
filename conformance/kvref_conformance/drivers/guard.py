"""Limits around code that may misbehave: time for a call, memory for a check.

They work where the system has them (POSIX signals in the main thread, Linux data limits) and for calls that return to Python now
and then; what hangs or dies inside a library takes `kvref check --isolate`.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

TIMEOUT = 10.0  # seconds a call may take, unless asked otherwise
ONCE_HUNG = 1.0  # seconds for an operation that took too long before
AGAIN = 1.0  # seconds to the next alarm, should Python or the implementation have swallowed one
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


def _stop(signum: int, frame: FrameType | None) -> None:
    """Python ignores what is raised in a callback of its garbage collector, such as Hypothesis's: the next alarm will do."""
    if frame is None or frame.f_code.co_name != "gc_callback":
        raise TimedOut


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimedOut inside the block after so many seconds."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def memory_limit(extra: int = MEMORY) -> Iterator[None]:
    """Let allocations inside the block fail with MemoryError, instead of taking the machine down."""
    used = data_bytes()
    if used is None:
        yield
        return
    import resource  # not on every system: data_bytes says

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + extra if hard == resource.RLIM_INFINITY else min(used + extra, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def data_bytes() -> int | None:
    """The process's private memory in bytes, or None where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:")), None)
