"""A transfer cache whose parts are written by another process, as a one-sided transport (RDMA) does.

The blocks are shared memory. The writer, a process, writes rows to the slots that the cache names, and reads the rows of exports.
It never learns of an abort, and the cache cannot refuse a write that it has posted. The writer holds up to `window` writes back,
and executes the newest first: writes take effect late, and in another order.

- `arrive` posts a write. `commit` and `fence` wait until the writer has confirmed all posted writes, or has died.
- A dead writer writes nothing more. Another process takes over. Its unconfirmed writes are posted again, or have not arrived.
"""

import os
import signal
import weakref
from contextlib import contextmanager
from math import prod
from typing import ClassVar

import numpy as np
from commandline import fork_server

import kvref
from kvref.backend import reference
from kvref_conformance.implementations.backends import OnBackend

reference.xp  # imports array_api_compat in the fork server, and not in each process
LOST = EOFError, BrokenPipeError, ConnectionResetError


class SharedMemory:
    """The reference backend, with stores that two processes share. parts: the memory of another process, in order."""

    def __init__(self, parts=None):
        self._others, self.parts = None if parts is None else iter(parts), []

    def __getattr__(self, name):
        return getattr(reference, name)

    def zeros(self, shape, dtype):
        kind, size = reference.zeros((1,), dtype).dtype, prod(shape)
        part = fork_server().RawArray("B", max(1, size * kind.itemsize)) if self._others is None else next(self._others)
        self.parts.append(part)
        return np.frombuffer(part, kind, size).reshape(shape)


def write_parts(connection, config, parts, window, dies_after):
    """The program of the writer. dies_after: the number of the write before which it is killed, or None."""
    cache, posted, confirmed, count = kvref.TransferCache(config, SharedMemory(parts)), [], [], 0
    while True:
        try:
            name, *arguments = connection.recv()
        except LOST:
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
        if name == "confirm":
            connection.send(confirmed)
            confirmed = []
        elif name == "read":
            connection.send([store.read(arguments[0]) for store in cache._stores])


def start(program, *arguments):
    process = fork_server().Process(target=program, args=arguments, daemon=True)
    process.start()
    return process


def end(process):
    process.kill()
    process.join()


class ProcessTransferCache(kvref.TransferCache):
    def __init__(self, config, window=0, dies_after=None, resends=True):
        self._memory = SharedMemory()
        super().__init__(config, self._memory)
        self._window, self._dies_after, self._resends = window, dies_after, resends
        self._process = self._connection = self._end = self._part_of = None
        self._unconfirmed, self._count = {}, 0  # per number of a write: its transfer, layer and first position, and its message

    def arrive(self, transfer, layer, start, heads, keys, values):
        with self._by_the_writer(transfer, layer, start):
            super().arrive(transfer, layer, start, heads, keys, values)

    def write_late(self, transfer, layer, start, heads, keys, values):
        with self._by_the_writer(transfer, layer, start):
            super().write_late(transfer, layer, start, heads, keys, values)

    def send(self, handle, layer, tokens, heads):
        with self._by_the_writer(handle):
            return super().send(handle, layer, tokens, heads)

    def commit(self, transfer):
        self._known(transfer, self._open)
        self._confirm()
        return super().commit(transfer)

    def fence(self, transfer):
        self._known(transfer, self._aborted)
        self._confirm()
        super().fence(transfer)

    def kill_writer(self):
        end(self._process)

    @contextmanager
    def _by_the_writer(self, *part):
        self._part_of = part
        try:
            yield
        finally:
            self._part_of = None

    def _write(self, slots, heads, keys, values):
        if self._part_of is None:
            super()._write(slots, heads, keys, values)
            return
        self._count += 1
        message = ("write", self._count, slots, heads, np.array(keys), np.array(values))
        self._unconfirmed[self._count] = *self._part_of, message
        self._ask(message)

    def _read(self, table, layer, positions):
        if self._part_of is None:
            return super()._read(table, layer, positions)
        slots = self._tables.slots(table, layer, np.arange(positions.start, positions.stop))
        keys, values = zip(*self._ask(("read", slots), replies=True), strict=True)
        return np.concatenate(keys, axis=1), np.concatenate(values, axis=1)

    def _confirm(self):
        while self._unconfirmed:
            for number in self._ask(("confirm",), replies=True):
                self._unconfirmed.pop(number, None)

    def _ask(self, message, replies=False):
        """Send a message to the writer, and return its reply. If the writer has died, another takes over."""
        if self._process is None:
            self._start()
        try:
            self._connection.send(message)
            return self._connection.recv() if replies else None
        except LOST:
            self._end()
            self._dies_after = self._process = None
            self._lose()
            return self._ask(message, replies) if replies else None
        except BaseException:  # interrupted: the pending reply would be taken for the reply to the next message
            self._end()
            raise

    def _lose(self):
        """The writer is dead, and has not confirmed some writes."""
        lost, self._unconfirmed = self._unconfirmed, {}
        for number, (transfer, layer, start, message) in lost.items():
            if transfer not in self._open:
                continue
            if self._resends:
                self._unconfirmed[number] = transfer, layer, start, message
                self._ask(message)
            else:
                heads, keys = message[3], message[4]
                self._open[transfer].arrived[layer, start : start + len(keys), heads.start : heads.stop] = False

    def _start(self):
        self._connection, other = fork_server().Pipe()
        self._process = start(write_parts, other, self.config, self._memory.parts, self._window, self._dies_after)
        self._end = weakref.finalize(self, end, self._process)
        other.close()


class TransferProcesses(OnBackend):
    """The implementation. made: the class of its caches; options: their options."""

    limits: ClassVar = {"threads": False}  # all calls of a cache share one pipe to its writer

    def __init__(self, made=ProcessTransferCache, **options):
        super().__init__(reference)
        start(os.getpid).join()  # the fork server needs seconds to start, and each call of the judge has a time limit
        self.name, self._made, self._options = "transfer-processes", made, options

    def transfer(self, **config):
        return self._made(kvref.TransferConfig(**config), **self._options)
