"""Messages between the judge and its child, both ways, through a socket.

The child runs foreign code, and whatever that writes to a file descriptor which is not its own arrives here too. So each message
says how long it is and has a sum, and nothing is waited for, or unpickled, on the word of anything else.
"""

import pickle
import socket
import struct
import time
import zlib
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

MARK = b"kvref\0\xff\n"  # no text, and no small number
HEAD = struct.Struct("<8sQI")  # the mark; of what follows, its length and its sum
CHUNK = 2**20  # bytes that are read at once


class Garbled(Exception):
    """What came is no message."""


class Channel:
    """One end. file: a descriptor of a connected socket, which is this object's from then on."""

    def __init__(self, file: int) -> None:
        self._socket = socket.socket(fileno=file)

    def close(self) -> None:
        self._socket.close()

    def hang_up(self) -> None:
        """Have the other end read that nothing more comes."""
        with suppress(OSError):  # it is gone already
            self._socket.shutdown(socket.SHUT_WR)

    def wait_for_the_end(self, within: float) -> None:
        """Until nobody is at the other end any more, so many seconds at most. What still comes is not heard."""
        until = time.monotonic() + within
        with suppress(OSError):
            while (left := until - time.monotonic()) > 0 and self.speaks(left) and self._socket.recv(CHUNK):
                pass

    def send(self, message: Any) -> None:
        """Raises ConnectionError where nobody is at the other end."""
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._socket.sendall(HEAD.pack(MARK, len(content), zlib.crc32(content)) + content)

    def speaks(self, within: float | None) -> bool:
        """Whether something comes, be it the end, within so many seconds; None: however long it takes."""
        return bool(wait([self._socket], within))

    def receive(self, within: float | None = None) -> Any:
        """The next message, whole within so many seconds.

        Raises Garbled, TimeoutError where it has begun and does not end, and EOFError or ConnectionError where nobody is there.
        """
        until = None if within is None else time.monotonic() + within
        mark, length, checksum = HEAD.unpack(self._read(HEAD.size, until))
        if mark != MARK:
            raise Garbled
        content = self._read(length, until)
        if zlib.crc32(content) != checksum:
            raise Garbled
        try:
            return pickle.loads(content)
        except Exception as error:  # whatever unpickling makes of it
            raise Garbled from error

    def _read(self, count: int, until: float | None) -> bytes:
        content = bytearray()
        while len(content) < count:
            if not self.speaks(None if until is None else until - time.monotonic()):
                raise TimeoutError
            part = self._socket.recv(min(count - len(content), CHUNK))
            if not part:
                raise EOFError
            content += part
        return bytes(content)
