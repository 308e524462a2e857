"""What all tests share: the same examples each time, and one thread of arithmetic per process."""

import os

from hypothesis import settings

pytest_plugins = ["pytester", "browser", "commandline"]

# pytest-xdist starts one process per core, and these start others: more threads would only wait for each other's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# CI must not find on Tuesday what it missed on Monday.
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("fixed")
