"""A program that runs a command until its standard input ends: it does so when whoever began this is gone, in whatever way.

To be started in a process group of its own, all of which it ends. The judge's limit of memory is about what a check allocates
in its process, and a command is begun within one: it is lifted here.
"""

import os
import signal
import subprocess
import sys
import threading


def _end_with_the_input() -> None:
    while os.read(sys.stdin.fileno(), 1):  # not sys.stdin.read, which a program that ends may not be left in
        pass
    os.killpg(0, signal.SIGKILL)


def _lift_the_limit_of_memory() -> None:
    try:
        import resource  # not on every system
    except ImportError:
        return
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


if __name__ == "__main__":
    _lift_the_limit_of_memory()
    threading.Thread(target=_end_with_the_input, daemon=True).start()
    sys.exit(subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL).returncode)
