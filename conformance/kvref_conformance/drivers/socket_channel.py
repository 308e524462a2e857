"""Messages between the judge and its child process, in both directions, through a socket.

The child runs foreign code, which may by mistake write to the descriptor of this socket. Each message therefore starts with a
mark, its length and a checksum. Bytes without a valid mark and checksum are never unpickled, and their length is not trusted.
"""

import pickle
import socket
import struct
import time
import zlib
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

FRAME_MARK = b"kvref\0\xff\n"  # neither text nor small integers, which foreign code might write
FRAME_HEADER = struct.Struct("<8sQI")  # the mark, and the length and checksum of the content
CHUNK = 2**20  # bytes per read


class MalformedFrame(Exception):
    """The bytes received are not a message."""


class SocketChannel:
    """One end of the connection. file: the descriptor of a connected socket, which this object owns and closes."""

    def __init__(self, file: int) -> None:
        self._socket = socket.socket(fileno=file)

    def close(self) -> None:
        self._socket.close()

    def shut_down(self) -> None:
        """Signal the end of the messages to the other end."""
        with suppress(OSError):  # the other end is already closed
            self._socket.shutdown(socket.SHUT_WR)

    def drain_until_closed(self, seconds: float) -> None:
        """Discard everything until the other end closes, for at most `seconds` seconds."""
        until = time.monotonic() + seconds
        with suppress(OSError):
            while (left := until - time.monotonic()) > 0 and self.has_data(left) and self._socket.recv(CHUNK):
                pass

    def send(self, message: Any) -> None:
        """Send a message. Raises ConnectionError if the other end is closed."""
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._socket.sendall(FRAME_HEADER.pack(FRAME_MARK, len(content), zlib.crc32(content)) + content)

    def has_data(self, seconds: float | None) -> bool:
        """Whether data or the end of the stream arrives within `seconds` seconds (None: without a limit)."""
        return bool(wait([self._socket], seconds))

    def receive(self, seconds: float | None = None) -> Any:
        """The next message, complete within `seconds` seconds (None: without a limit).

        Raises MalformedFrame if it is not a message, TimeoutError if it is late or incomplete, EOFError or ConnectionError if
        the other end is closed.
        """
        until = None if seconds is None else time.monotonic() + seconds
        mark, length, checksum = FRAME_HEADER.unpack(self._read(FRAME_HEADER.size, until))
        if mark != FRAME_MARK:
            raise MalformedFrame
        content = self._read(length, until)
        if zlib.crc32(content) != checksum:
            raise MalformedFrame
        try:
            return pickle.loads(content)
        except Exception as error:  # unpickling can raise any error
            raise MalformedFrame from error

    def _read(self, count: int, until: float | None) -> bytes:
        content = bytearray()
        while len(content) < count:
            if not self.has_data(None if until is None else until - time.monotonic()):
                raise TimeoutError
            part = self._socket.recv(min(count - len(content), CHUNK))
            if not part:
                raise EOFError
            content += part
        return bytes(content)
