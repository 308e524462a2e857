"""Implementations that send Ctrl-C to the judge during a call: `kvref check interrupting:Once`."""

import os
import signal
import sys
import time
from pathlib import Path

import kvref
from kvref_conformance.implementations.backends import OnBackend

ISOLATED = sys.argv[0] == "-c"
JUDGE = os.getppid() if ISOLATED else os.getpid()


def press():
    """Send SIGINT as a terminal does: to the judge, and to all processes in its session."""
    Path("child").write_text(str(os.getpid()) if ISOLATED else "", encoding="ascii")
    os.kill(JUDGE, signal.SIGINT)


class Pool(kvref.BlockPool):
    """Fails one clause, BLOCK-06: its utilization is always 0."""

    utilization = 0.0


class Once(OnBackend):
    """Interrupts when the first contiguous cache is created, after the block pools were judged."""

    name = "once"

    def __init__(self):
        super().__init__(kvref.reference)

    def blocks(self, num_blocks):
        return Pool(num_blocks)

    def contiguous(self, **config):
        press()
        time.sleep(60)


class Swallows(Once):
    """Interrupts, and catches the exception."""

    def contiguous(self, **config):
        try:
            press()
            time.sleep(60)
        except BaseException:
            return super(Once, self).contiguous(**config)


class SwallowsForGood(Once):
    """Interrupts again and again, catches the exception each time, and never returns."""

    def contiguous(self, **config):
        while True:
            try:
                press()
                time.sleep(60)
            except BaseException:
                continue


def while_it_is_made():
    press()
    time.sleep(60)


def whose_making_swallows():
    try:
        press()
        time.sleep(60)
    except BaseException:
        return Once()
