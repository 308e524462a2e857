"""Ctrl-C in the `kvref` command: the first ends the run in good order, the second ends the process at once.

Python raises KeyboardInterrupt in whichever code is running, and an implementation may swallow it. The handler of this module
therefore also sets a flag, and `look` raises KeyboardInterrupt again in the judge's own code. Inside a `wait` block the first
Ctrl-C only sets the flag. Without a call of `handle`, for example under pytest, Python's own behavior applies.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

EXIT_INTERRUPTED = 130  # the exit status that shells use for a program that Ctrl-C ended

asked = False  # whether Ctrl-C was pressed
at_once: list[Callable[[], None]] = []  # functions to call before the process ends at once
_waits = False


def handle() -> None:
    """Install the handlers of Ctrl-C, and of SIGTERM and SIGHUP, which end child processes first."""
    signal.signal(signal.SIGINT, _ctrl_c)
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # not on every system
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # keep a handler that nohup has set
            signal.signal(number, _terminated)


def over() -> None:
    """Restore the default handler of Ctrl-C: the run is over, and nothing needs to be put in order."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def look() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed, in case it was deferred or swallowed. Does nothing in other threads."""
    if asked and _in_main_thread():
        raise KeyboardInterrupt


class _Block:
    """A block inside which Ctrl-C is deferred (waits) or raised at once (not waits)."""

    def __init__(self, waits: bool) -> None:
        self._inside = waits

    def __enter__(self) -> None:
        global _waits
        if asked and not self._inside:
            look()
        self._before, self._ours = _waits, _in_main_thread()
        if self._ours:
            _waits = self._inside

    def __exit__(self, *_: object) -> None:
        global _waits
        if self._ours:
            _waits = self._before


def wait() -> _Block:
    """A block inside which Ctrl-C is deferred until `look` or a `prompt` block."""
    return _Block(waits=True)


def prompt() -> _Block:
    """A block inside which Ctrl-C raises KeyboardInterrupt at once. For code that may take long and can be interrupted."""
    return _Block(waits=False)


def _ctrl_c(signum: int, frame: FrameType | None) -> None:
    global asked
    if asked:
        _leave()
        os._exit(EXIT_INTERRUPTED)
    asked = True
    if not _waits:
        raise KeyboardInterrupt


def _terminated(signum: int, frame: FrameType | None) -> None:
    _leave()
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def _leave() -> None:
    for step in at_once:
        step()


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident
