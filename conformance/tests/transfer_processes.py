"""A transfer cache whose rows are written by another process, as a one-sided transport (RDMA) does.

The blocks are shared memory. The peer, a process, maps them, and writes to slots and reads from slots that the cache names. It
never learns of an abort, and the cache cannot refuse a write that it has posted. The peer holds up to `window` writes back and
executes the newest first, so that they take effect late and in another order. A write counts when the peer has confirmed it:

- `arrive` posts a write. `commit` and `fence` wait until the peer has confirmed every posted write, or has died.
- A dead peer writes nothing more. Its unconfirmed writes are posted to a new peer (`resend`), or have not arrived.
"""

import mmap
import os
import signal
import tempfile
from math import prod
from multiprocessing import get_context

import numpy as np

import kvref
from kvref_conformance.implementations.backends import OnBackend

LOST = EOFError, BrokenPipeError, ConnectionResetError


class SharedArrays:
    """The NumPy backend, with stores in files that two processes map. files: those of another process, in order."""

    def __init__(self, files=None):
        self._numpy, self._others = kvref.backend("numpy"), None if files is None else iter(files)
        self.files = []

    def __getattr__(self, name):
        return getattr(self._numpy, name)

    def zeros(self, shape, dtype):
        kind = self._numpy.zeros((1,), dtype).dtype
        if self._others is None:
            file = tempfile.NamedTemporaryFile(dir="/dev/shm")  # noqa: SIM115 - removed with the cache
            file.truncate(max(1, prod(shape) * kind.itemsize))
            self.files.append(file)
            number = file.fileno()
        else:
            number = os.open(next(self._others), os.O_RDWR)
        memory = mmap.mmap(number, 0)
        if self._others is not None:
            os.close(number)
        return np.frombuffer(memory, kind, prod(shape)).reshape(shape)


def peer(connection, config, files, window, dies_after):
    """The program of the other process. dies_after: the number of the write that kills it before it is executed, or None."""
    cache, posted, confirmed, count = kvref.TransferCache(config, SharedArrays(files)), [], [], 0
    while True:
        try:
            name, *arguments = connection.recv()
        except EOFError:
            return
        if name == "write":
            count += 1
            if count == dies_after:
                os.kill(os.getpid(), signal.SIGKILL)
            posted.append(arguments)
        while len(posted) > (window if name == "write" else 0):
            number, slots, heads, keys, values = posted.pop()
            cache._write(slots, heads, keys, values)
            confirmed.append(number)
        if name == "drain":
            connection.send(confirmed)
            confirmed = []
        elif name == "read":
            connection.send([store.read(arguments[0]) for store in cache._stores])


class ProcessTransferCache(kvref.TransferCache):
    def __init__(self, config, window=0, dies_after=None, resend=True):
        self._memory = SharedArrays()
        super().__init__(config, self._memory)
        self._window, self._dies_after, self._resend = window, dies_after, resend
        self._process = self._connection = self._target = None
        self._unconfirmed, self._posts = {}, 0  # per number of a write: its transfer, the view of its rows, the message

    def arrive(self, transfer, layer, start, heads, keys, values):
        self._target = transfer, layer, start
        try:
            super().arrive(transfer, layer, start, heads, keys, values)
        finally:
            self._target = None

    def write_late(self, transfer, layer, start, heads, keys, values):
        self._target = transfer, layer, start
        try:
            super().write_late(transfer, layer, start, heads, keys, values)
        finally:
            self._target = None

    def commit(self, transfer):
        self._known(transfer, self._open)
        self._drain()
        return super().commit(transfer)

    def fence(self, transfer):
        self._known(transfer, self._aborted)
        self._drain()
        super().fence(transfer)

    def kill_peer(self):
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()

    def _write(self, slots, heads, keys, values):
        if self._target is None:
            super()._write(slots, heads, keys, values)
            return
        self._posts += 1
        message = ("write", self._posts, slots, heads, np.array(keys), np.array(values))
        self._unconfirmed[self._posts] = *self._target, message
        self._ask(message)

    def _read(self, table, layer, positions):
        if table not in self._exports.values():
            return super()._read(table, layer, positions)
        slots = self._tables.slots(table, layer, np.arange(positions.start, positions.stop))
        keys, values = zip(*self._ask(("read", slots), reply=True), strict=True)
        return np.concatenate(keys, axis=1), np.concatenate(values, axis=1)

    def _drain(self):
        while self._unconfirmed:
            for number in self._ask(("drain",), reply=True):
                self._unconfirmed.pop(number, None)

    def _ask(self, message, reply=False):
        """Send a message to the peer, and return its reply. If the peer has died, its writes are lost, and another takes over."""
        if self._process is None:
            self._start()
        try:
            self._connection.send(message)
            return self._connection.recv() if reply else None
        except LOST:
            self._process.join()
            self._dies_after = self._process = None
            self._lose()
            return self._ask(message, reply) if reply else None
        except BaseException:  # an interrupt: the pending reply would be taken for that of the next message
            self.kill_peer()
            raise

    def _lose(self):
        """The peer is dead, and some of its writes were not confirmed."""
        lost, self._unconfirmed = self._unconfirmed, {}
        for number, (transfer, layer, start, message) in lost.items():
            if transfer not in self._open:
                continue
            if self._resend:
                self._unconfirmed[number] = transfer, layer, start, message
                self._ask(message)
            else:
                heads, keys = message[3], message[4]
                self._open[transfer].arrived[layer, start : start + len(keys), heads.start : heads.stop] = False

    def _start(self):
        here, there = get_context("fork").Pipe()
        files = [file.name for file in self._memory.files]
        arguments = there, self.config, files, self._window, self._dies_after
        self._process = get_context("fork").Process(target=_peer_without, args=(here, *arguments), daemon=True)
        self._process.start()
        there.close()
        self._connection = here

    def __del__(self):
        if getattr(self, "_process", None) is not None:
            self._process.kill()
            self._process.join()


def _peer_without(other_end, *arguments):
    """Close the inherited end of the cache, so that the peer ends when the cache does."""
    other_end.close()
    peer(*arguments)


class TransferProcesses(OnBackend):
    """The implementation. made: the class of its caches; options: their options."""

    name = "transfer-processes"
    limits = {"threads": False}  # noqa: RUF012

    def __init__(self, made=ProcessTransferCache, **options):
        super().__init__(kvref.backend("numpy"))
        self.name, self._made, self._options = "transfer-processes", made, options

    def transfer(self, **config):
        return self._made(kvref.TransferConfig(**config), **self._options)
