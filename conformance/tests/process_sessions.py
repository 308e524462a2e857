"""Finds the running processes of a session, to test that the judge ends a process together with all that it started."""

import time
from pathlib import Path

import pytest

ENDING = 5.0  # seconds until killed processes must have ended


def running_in(session):
    """Return the processes of the session that still run after killed processes had time to end."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("the system does not say which processes run")
    end = time.monotonic() + ENDING
    while (found := _found(session)) and time.monotonic() < end:
        time.sleep(0.01)
    return found


def _found(session):
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its = path.read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue  # ended in the meantime
        if int(its) == session and state not in "ZX":
            found.append(int(path.parent.name))
    return found
