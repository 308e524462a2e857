"""A program that runs a command until its standard input ends: it does so when whoever began this is gone, in whatever way.

To be started in a process group of its own, all of which it ends.
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


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_input, daemon=True).start()
    sys.exit(subprocess.run(sys.argv[1:], stdin=subprocess.DEVNULL).returncode)
