"""The child of an `IsolatedJudge`: judges as it is asked, and writes down each request first."""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

from kvref_conformance.checking.registry import all_checks
from kvref_conformance.conversation.drivers.channel import Channel
from kvref_conformance.conversation.drivers.guard import collect_rarely
from kvref_conformance.conversation.drivers.journal import Writer
from kvref_conformance.conversation.trace.shrink import Held
from kvref_conformance.families import names as families
from kvref_conformance.implementations import load
from kvref_conformance.interface import offers
from kvref_conformance.judging.asked import Effort
from kvref_conformance.judging.judge import Judge
from kvref_conformance.oracle.witness import Unknown
from kvref_conformance.outcome import CannotRun, NotOffered, Outcome

LOOK = 0.5  # seconds between two looks at whether there still is a parent
ENDING = 1.0  # seconds from then on
ANSWERS = (CannotRun, NotOffered, Unknown)  # exceptions that say something of the implementation


def main() -> None:
    """Started with the descriptors of the channel and of the journal as the last two arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    channel, journal = Channel(int(sys.argv[2])), int(sys.argv[3])
    os.dup(int(sys.argv[2]))  # and the parent hears when this process ends, which is not when `channel` does
    name: str
    effort: Effort
    name, effort = channel.receive()
    try:
        judge = Judge(load(name), effort, name)
    except CannotRun as error:
        channel.send(("cannot run", str(error)))
        return
    collect_rarely()
    judge.watchers.append(Writer(journal))
    judge.progress = lambda *how_far: channel.send(("progress", how_far))
    implementation = judge.implementation
    said = {each: getattr(implementation, each) for each in ("name", "version", "language", "level")}
    said |= {"limits": getattr(implementation, "limits", None), "project": getattr(implementation, "project", said["name"])}
    offered = dict.fromkeys((family for family in families() if offers(implementation, family)), True)
    channel.send(("ready", {**said, "formats": tuple(implementation.formats), **offered}))
    while True:
        try:
            work, about = channel.receive()
        except EOFError:
            return
        try:
            answer: tuple[str, Any] = "answer", work(judge, *about)
        except ANSWERS as error:
            answer = "raised", error
        except Exception:  # the judge's own, and not for the implementation to answer for
            answer = "raised", RuntimeError(traceback.format_exc())
        channel.send(answer)


def _end_with(parent: int) -> None:
    """Where the parent was killed nobody ends what runs here, and all that it started: a call that hangs would do so for good."""
    while os.getppid() == parent:
        time.sleep(LOOK)
    time.sleep(ENDING)  # it may be ending by itself, in good order: its channel has ended, too
    os.killpg(os.getpgrp(), signal.SIGKILL)


def checked(judge: Judge, index: int) -> Outcome | tuple[Held, Sequence[str]]:
    """What one of all checks says; a check itself, a function, stays here."""
    said = judge.checked(all_checks()[index])
    return said if isinstance(said, Outcome) else (Held(said.conversation, said.broken), said.through)


def searched(judge: Judge, family: str) -> dict[str, Any]:
    """What a machine found; the implementation stays here."""
    search = judge.search(family)
    return {"findings": search.findings, "longest": search.longest, "through": search.through}
