"""Ctrl-C in the `kvref` command: the first ends the run in good order, the second ends the process at once.

Python raises KeyboardInterrupt in whichever code is running, and an implementation may swallow it. The handler of this module
therefore also sets a flag, and `raise_if_interrupted` raises KeyboardInterrupt again in the judge's own code. Inside a
`defer_interrupts` block the first Ctrl-C only sets the flag. Without a call of `install_handlers`, for example under pytest,
Python's own behavior applies.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

EXIT_INTERRUPTED = 130  # the exit status that shells use for a program that Ctrl-C ended

interrupted = False  # whether Ctrl-C was pressed
exit_callbacks: list[Callable[[], None]] = []  # functions to call before the process ends at once
_deferring = False


def install_handlers() -> None:
    """Install the handlers of Ctrl-C, and of SIGTERM and SIGHUP, which end child processes first."""
    signal.signal(signal.SIGINT, _on_sigint)
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # not on every system
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # keep a handler that nohup has set
            signal.signal(number, _on_termination)


def restore_default_handler() -> None:
    """Restore the default handler of Ctrl-C: the run is over, and nothing needs to be put in order."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_if_interrupted() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed, in case it was deferred or swallowed. Does nothing in other threads."""
    if interrupted and _in_main_thread():
        raise KeyboardInterrupt


class _InterruptBlock:
    """A block inside which Ctrl-C is deferred (waits) or raised at once (not waits)."""

    def __init__(self, waits: bool) -> None:
        self._inside = waits

    def __enter__(self) -> None:
        global _deferring
        if interrupted and not self._inside:
            raise_if_interrupted()
        self._before, self._ours = _deferring, _in_main_thread()
        if self._ours:
            _deferring = self._inside

    def __exit__(self, *_: object) -> None:
        global _deferring
        if self._ours:
            _deferring = self._before


def defer_interrupts() -> _InterruptBlock:
    """A block inside which Ctrl-C is deferred until `raise_if_interrupted` or an `allow_interrupts` block."""
    return _InterruptBlock(waits=True)


def allow_interrupts() -> _InterruptBlock:
    """A block inside which Ctrl-C raises KeyboardInterrupt at once. For code that may take long and can be interrupted."""
    return _InterruptBlock(waits=False)


def _on_sigint(signum: int, frame: FrameType | None) -> None:
    global interrupted
    if interrupted:
        _run_exit_callbacks()
        os._exit(EXIT_INTERRUPTED)
    interrupted = True
    if not _deferring:
        raise KeyboardInterrupt


def _on_termination(signum: int, frame: FrameType | None) -> None:
    _run_exit_callbacks()
    signal.signal(signum, signal.SIG_DFL)
    os.kill(os.getpid(), signum)


def _run_exit_callbacks() -> None:
    for step in exit_callbacks:
        step()


def _in_main_thread() -> bool:
    return threading.get_ident() == threading.main_thread().ident
