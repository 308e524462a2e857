"""A program that runs a command and kills it when standard input closes, so that the command ends when its parent process ends.

Start it in a process group of its own: it kills the whole group. It also lifts the memory limit (RLIMIT_DATA) that the judge sets
for a check, because child processes inherit the limit.
"""

import os
import signal
import subprocess
import sys
import threading


def _kill_group_at_end_of_input() -> None:
    # not sys.stdin.read: the interpreter cannot shut down while a daemon thread holds its lock
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.killpg(0, signal.SIGKILL)


def _lift_memory_limit() -> None:
    try:
        import resource  # not available on every system
    except ImportError:
        return
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


if __name__ == "__main__":
    _lift_memory_limit()
    threading.Thread(target=_kill_group_at_end_of_input, daemon=True).start()
    sys.exit(subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL).returncode)
