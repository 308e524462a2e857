"""How long processes could run but waited for a processor. On a busy machine this is not time that the implementation took.

Linux counts it per thread. The number is that of the main thread, which makes the calls. On other systems it is 0.
"""

import contextlib
import os

_descriptors: dict[int, int] = {}  # by process id: its open /proc/PID/schedstat; of this process and of its programs


def processor_wait(process: int) -> float:
    """Return the seconds that the process has waited; 0.0 if it has ended, or if the system does not count them."""
    try:
        with open(f"/proc/{process}/schedstat", "rb") as file:
            return _seconds(file.read())
    except OSError:
        return 0.0


def add_process(process: int) -> None:
    """Count the time that a child process waits in `total_wait`."""
    with contextlib.suppress(OSError):
        _descriptors[process] = os.open(f"/proc/{process}/schedstat", os.O_RDONLY)


def remove_process(process: int) -> None:
    if (descriptor := _descriptors.pop(process, None)) is not None:
        os.close(descriptor)


def total_wait() -> float:
    """Return the seconds that this process and its programs have waited. It decreases when a program ends."""
    if os.getpid() not in _descriptors:  # the first call, or the first one in a fork, whose descriptors are those of its parent
        for process in list(_descriptors):
            remove_process(process)
        add_process(os.getpid())
    total = 0.0
    for descriptor in list(_descriptors.values()):
        with contextlib.suppress(OSError):  # the process has ended
            total += _seconds(os.pread(descriptor, 64, 0))
    return total


def _seconds(schedstat: bytes) -> float:
    return int(schedstat.split()[1]) * 1e-9
