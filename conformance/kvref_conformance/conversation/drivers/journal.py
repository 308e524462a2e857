"""The conversation of a process that may end at any moment, in a file that outlives it.

Each exchange is written before the call is made, so that the last is the one that ended it. To write costs a process as little as
can be, for it is done at every call; to read is for the day of a death.
"""

import io
import os
import pickle
import struct
import tempfile
import zlib
from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.conversation.exchange import Exchange, Reply, Request
from kvref_conformance.conversation.subject import Subject

# Of one conversation, which overwrites the one before it: its number, where the exchange stands in it, and of the exchange, which
# may have been cut short, how long it is and its sum.
HEAD = struct.Struct("<IIII")
AWAY = 2**33  # a place in the file; nothing is kept between, and it takes no room


class Writer:
    """A watcher of requests. file: a descriptor."""

    def __init__(self, file: int) -> None:
        self._file, self._end, self._number = file, 0, 0
        os.lseek(file, AWAY, os.SEEK_SET)  # what the implementation writes to a descriptor that is not its own goes there

    def __call__(self, subject: Subject, exchange: Exchange) -> None:
        position = len(subject.conversation) - 1
        if position == 0:
            self._number, self._end = self._number + 1, 0
        before = subject.conversation[-2].reply if position else None
        request, answer = exchange.request, before and (before.ok, before.error)
        # Their fields and not the objects, whose classes take most of the time.
        said = _dumped((request.id, request.op, request.on, request.args, exchange.quiet, answer))
        written = HEAD.pack(self._number, position, len(said), zlib.crc32(said)) + said
        os.pwrite(self._file, written, self._end)
        self._end += len(written)


class _Pickler(pickle.Pickler):
    """Arrays as their bytes: what they say of themselves to `pickle` takes four times as long."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray and value.dtype.kind in "biuf":
            return _array, (value.dtype.str, value.shape, value.tobytes())
        return NotImplemented


def _dumped(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def _array(dtype: str, shape: tuple[int, ...], values: bytes) -> NDArray:
    return np.frombuffer(values, dtype).reshape(shape).copy()


class Journal:
    """The file: made here, written by the other process, read by this one."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - until `close`
        self.descriptor = self._file.fileno()

    def close(self) -> None:
        self._file.close()

    def last_written(self) -> int:
        """Another number when something was written since."""
        return os.fstat(self.descriptor).st_mtime_ns

    def read(self) -> list[Exchange]:
        """The conversation up to the last call that was made."""
        conversation: list[Exchange] = []
        self._file.seek(0)
        first = None
        while len(head := self._file.read(HEAD.size)) == HEAD.size:
            number, position, length, checksum = HEAD.unpack(head)
            said = self._file.read(length) if first in (None, number) else b""
            if not said or zlib.crc32(said) != checksum:
                break  # of a conversation before, or cut short
            first = number
            *request, quiet, answer = pickle.loads(said)
            del conversation[position:]  # what is not offered is left out
            if conversation:
                conversation[-1].reply = answer and Reply(*answer)
            conversation.append(Exchange(Request(*request), quiet=quiet))
        return conversation
