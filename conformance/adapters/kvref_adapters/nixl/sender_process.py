"""The other end of NIXL's transfers: an agent in its own process, which writes to and reads from the memory of the cache.

It knows addresses only. It does not know which transfer a write belongs to, or that a transfer was aborted.
"""

import logging
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

Spans = list[tuple[int, int]]  # address and number of bytes, each
STAGED = 1 << 20  # bytes of rows that can be in flight


def new_agent(name: str) -> Any:
    """Create an agent, which would print its settings to standard output."""
    logging.getLogger("nixl").setLevel(logging.ERROR)
    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def serve(connection: Connection) -> None:
    """Handle requests until the connection is closed: (number, name, arguments). Each reply is (number, result)."""
    sender = Sender()
    try:
        while True:
            while sender.is_writing() and not connection.poll(0.0002):
                pass
            number, name, *arguments = connection.recv()
            connection.send((number, getattr(sender, name)(*arguments)))
    except (EOFError, OSError):
        return


class Sender:
    def __init__(self) -> None:
        self._agent, self._receiver = new_agent("sender"), ""
        self._flying = list[Any]()  # handles of writes that were not complete when their state was last read
        self._staged, self._used, self._registered = np.zeros(0, np.uint8), 0, None
        self._make_room(STAGED)

    def metadata(self) -> bytes:
        found: bytes = self._agent.get_agent_metadata()
        return found

    def connect(self, metadata: bytes) -> None:
        """Connect to the agent of the receiver, or update what is known of its memory."""
        self._receiver = self._agent.add_remote_agent(metadata)

    def is_writing(self) -> bool:
        """Read the states of the writes. NIXL sends a notification only when the sender reads the state of a complete write."""
        self._flying = [handle for handle in self._flying if self._is_pending(handle)]
        return bool(self._flying)

    def write(self, rows: bytes, spans: Spans, notification: bytes) -> None:
        """Post a write of rows to these spans of the receiver's memory, in order. It can be in flight when this returns."""
        local = self._stage(len(rows))
        self._staged[local : local + len(rows)] = np.frombuffer(rows, np.uint8)
        handle = self._posted("WRITE", local, spans, notification)
        self._flying.append(handle)

    def read(self, spans: Spans) -> bytes:
        """Read these spans of the receiver's memory."""
        size = sum(length for _, length in spans)
        local = self._stage(size)
        self._finish(self._posted("READ", local, spans, b""))
        return self._staged[local : local + size].tobytes()

    def _posted(self, operation: str, local: int, spans: Spans, notification: bytes) -> Any:
        lengths = [length for _, length in spans]
        starts = self._staged.ctypes.data + local + np.cumsum([0, *lengths[:-1]])
        ours = [(int(start), length, 0) for start, length in zip(starts, lengths, strict=True)]
        theirs = [(start, length, 0) for start, length in spans]
        ends = self._agent.get_xfer_descs(ours, "DRAM"), self._agent.get_xfer_descs(theirs, "DRAM")
        handle = self._agent.initialize_xfer(operation, *ends, self._receiver, notification)
        if self._agent.transfer(handle) == "ERR":
            raise RuntimeError(f"{operation} of {len(spans)} descriptors returned ERR")
        return handle

    def _finish(self, handle: Any) -> None:
        while self._is_pending(handle):
            pass

    def _is_pending(self, handle: Any) -> bool:
        """Whether a transfer is in flight. The handle of any other is released."""
        state = self._agent.check_xfer_state(handle)
        if state != "PROC":
            self._agent.release_xfer_handle(handle)
        if state == "ERR":
            raise RuntimeError("the state of a transfer is ERR")
        return bool(state == "PROC")

    def _stage(self, size: int) -> int:
        """Return the start of `size` bytes that no transfer uses."""
        if self._used + size > len(self._staged):
            for handle in self._flying:
                self._finish(handle)
            self._flying.clear()
            self._used = 0
            if size > len(self._staged):
                self._make_room(size)
        start, self._used = self._used, self._used + size
        return start

    def _make_room(self, size: int) -> None:
        if self._registered:
            self._agent.deregister_memory(self._registered)
        self._staged = np.zeros(size, np.uint8)
        self._registered = self._agent.register_memory([(self._staged.ctypes.data, size, 0, "staged")], "DRAM")
