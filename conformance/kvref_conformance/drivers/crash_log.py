"""The crash log: a crash-safe record of the calls that a child process makes, in a file that outlives the process.

Each request is written before the call is made, so that the last one is the call that ended the process. Writing happens at every
call and is therefore fast. Reading happens only after a crash.
"""

import io
import os
import pickle
import struct
import tempfile
import zlib
from typing import Any

import numpy as np

from kvref_conformance.calls.messages import CallReply, CallRequest, Exchange
from kvref_conformance.calls.subject import Subject
from kvref_conformance.implementation_api import NDArray

# The header of a record: the number of the call trace (each overwrites the previous one), the index of the exchange in it, and
# the length and checksum of the record, which may be cut off.
RECORD_HEADER = struct.Struct("<IIII")
EMPTY_OFFSET = 2**33  # a file offset far past the records; the file is sparse, so the gap occupies no space


class CrashLogWriter:
    """A watcher (see CallRecorder) that writes the crash log. file: its descriptor."""

    def __init__(self, file: int) -> None:
        self._file, self._end, self._number = file, 0, 0
        os.lseek(
            file, EMPTY_OFFSET, os.SEEK_SET
        )  # stray writes of the implementation to this descriptor do not overwrite records

    def __call__(self, subject: Subject, exchange: Exchange) -> None:
        position = len(subject.call_trace) - 1
        if position == 0:
            self._number, self._end = self._number + 1, 0
        before = subject.call_trace[-2].reply if position else None
        request, answer = exchange.request, before and (before.ok, before.error)
        # Pickling the fields is several times faster than pickling the dataclass instances.
        said = _dump((request.id, request.op, request.on, request.args, exchange.quiet, answer))
        written = RECORD_HEADER.pack(self._number, position, len(said), zlib.crc32(said)) + said
        os.pwrite(self._file, written, self._end)
        self._end += len(written)


class _Pickler(pickle.Pickler):
    """Pickles arrays as their bytes, four times faster than NumPy's own reduction."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is np.ndarray and value.dtype.kind in "biuf":
            return _make_array, (value.dtype.str, value.shape, value.tobytes())
        return NotImplemented


def _dump(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def _make_array(dtype: str, shape: tuple[int, ...], values: bytes) -> NDArray:
    return np.frombuffer(values, dtype).reshape(shape).copy()


class CrashLog:
    """The file of the crash log: created and read by this process, written by the child."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - until `close`
        self.descriptor = self._file.fileno()

    def close(self) -> None:
        self._file.close()

    def last_written(self) -> int:
        """A number that differs whenever a record was written since (the modification time)."""
        return os.fstat(self.descriptor).st_mtime_ns

    def read(self) -> list[Exchange]:
        """The call trace up to the last call that was made."""
        call_trace: list[Exchange] = []
        self._file.seek(0)
        first = None
        while len(head := self._file.read(RECORD_HEADER.size)) == RECORD_HEADER.size:
            number, position, length, checksum = RECORD_HEADER.unpack(head)
            said = self._file.read(length) if first in (None, number) else b""
            if not said or zlib.crc32(said) != checksum:
                break  # a record of an earlier call trace, or one that is cut off
            first = number
            *request, quiet, answer = pickle.loads(said)
            del call_trace[position:]  # calls that were not offered have been removed from the call trace
            if call_trace:
                call_trace[-1].reply = answer and CallReply(*answer)
            call_trace.append(Exchange(CallRequest(*request), quiet=quiet))
        return call_trace
