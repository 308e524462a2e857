"""Ctrl-C, as the `kvref` command takes it: the first ends the run in good order, the second ends it at once.

Python raises KeyboardInterrupt wherever it is, and an implementation may swallow it. Here it is remembered, too, and raised again
as soon as the judge has the word; and where the judge must not be cut short, it waits. Without `handle`, under pytest say, all
is as Python has it.
"""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

EXIT_INTERRUPTED = 130  # as a shell says it of a program that Ctrl-C ended

asked = False  # Ctrl-C came
at_once: list[Callable[[], None]] = []  # what there is to do before the judge ends without ceremony
_waits = False


def handle() -> None:
    """From here on Ctrl-C is as this module says, to the end of the process; and to be terminated leaves nothing running."""
    signal.signal(signal.SIGINT, _ctrl_c)
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # not on every system
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # nohup's is to stay
            signal.signal(number, _terminated)


def over() -> None:
    """Nothing is left to be put in order: what Ctrl-C ends now, it ends at once."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def look() -> None:
    """Raise KeyboardInterrupt where Ctrl-C came and nobody has said so yet, or somebody has swallowed it."""
    if asked and _in_main_thread():
        raise KeyboardInterrupt


class _Block:
    """Whether Ctrl-C waits inside the block."""

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
    """Inside the block Ctrl-C waits for `look`, or for a `prompt` block."""
    return _Block(waits=True)


def prompt() -> _Block:
    """Inside the block Ctrl-C is raised at once: what it holds may take long, and can be cut short."""
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
