"""Implementations during which somebody presses Ctrl-C, in whichever process the judge is: `kvref check interrupting:Once`."""

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
    """In a terminal it is for the whole group: the judge, and whoever has no session of their own."""
    Path("child").write_text(str(os.getpid()) if ISOLATED else "", encoding="ascii")
    os.kill(JUDGE, signal.SIGINT)


class Pool(kvref.BlockPool):
    """Fails one clause, BLOCK-06: it says that none are used."""

    utilization = 0.0


class Once(OnBackend):
    """When the first contiguous cache is made, which comes after the block pools."""

    name = "once"

    def __init__(self):
        super().__init__(kvref.reference)

    def blocks(self, num_blocks):
        return Pool(num_blocks)

    def contiguous(self, **config):
        press()
        time.sleep(60)


class Swallows(Once):
    """And catches whatever comes."""

    def contiguous(self, **config):
        try:
            press()
            time.sleep(60)
        except BaseException:
            return super(Once, self).contiguous(**config)


class SwallowsForGood(Once):
    """And does not come to an end: Ctrl-C again."""

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
