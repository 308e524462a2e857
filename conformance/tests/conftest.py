"""Settings of all tests: deterministic Hypothesis examples, and one arithmetic thread per process."""

import os

from hypothesis import settings

pytest_plugins = ["pytester", "browser", "commandline"]

# pytest-xdist starts one process per core, and these start further processes: more threads would only compete for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# CI must not fail by chance on another day.
settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("fixed")
