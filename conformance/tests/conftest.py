"""Settings of all tests: deterministic Hypothesis examples, and one arithmetic thread per process."""

import os
import signal

import pytest
from hypothesis import settings

pytest_plugins = ["pytester", "browser", "commandline"]

# pytest-xdist starts one process per core, and these start further processes: more threads would only compete for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# CI must not fail by chance on another day.
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def _handler_of_ctrl_c():
    """Fail a test that leaves another handler of Ctrl-C: it would end the process at the next test that sends one."""
    before = signal.getsignal(signal.SIGINT)
    yield
    after = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert after is before, "a command was run in this process: use run_kvref of commandline.py"
