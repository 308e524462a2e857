"""Adapter of NIXL as the transport of a transfer cache: UCX on a CPU, between two agents in two processes.

NIXL moves bytes between registered memory of two agents. It has no blocks, sequences or transfers of prompts. These are kvref's
own (`TransferCache`), and the clauses about them say nothing about NIXL. What NIXL does here:

- The memory of all blocks is registered with the agent of the cache. The other agent connects with its metadata.
- `arrive` and `write_late` post a WRITE of the other agent: one descriptor per token, rank, and keys or values. Several parts can
  be in flight. `commit` and `fence` wait until NIXL has delivered the notification of every posted WRITE.
- `send` is a READ of the other agent.

The clauses that depend on NIXL are TRANSFER-02, -04, -07, -09, -11 and -12: bytes arrive at the addresses of the descriptors, all
of them are visible when the notification is, and nothing is written after it.
"""

import itertools
import multiprocessing
import weakref
from contextlib import contextmanager
from importlib.metadata import version
from math import prod
from typing import Any, ClassVar

import numpy as np

import kvref
from kvref.backend import reference
from kvref.formats import PLAIN_DTYPES, get_format
from kvref_adapters._shared.arrays import NumpyArrays
from kvref_adapters.nixl import sender_process

_FORK = multiprocessing.get_context("forkserver")
_FORK.set_forkserver_preload([sender_process.__name__])


class Agents:
    """The agent of the caches, and a process with the agent that writes and reads."""

    def __init__(self) -> None:
        self._numbers, self._delivered = itertools.count(), set[bytes]()
        self._pipe, other = _FORK.Pipe()
        process = _FORK.Process(target=sender_process.serve, args=(other,), daemon=True)
        process.start()
        other.close()
        weakref.finalize(self, _end, process)
        self.agent = sender_process.new_agent("receiver")
        self._removed = list[Any]()  # registrations of caches that were deleted
        self.agent.add_remote_agent(self.ask("metadata"))

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a method of Sender in the other process."""
        number = next(self._numbers)
        self._pipe.send((number, name, *arguments))
        while (reply := self._pipe.recv())[0] != number:
            pass  # of a call that was interrupted
        return reply[1]

    def register(self, memory: list[Any]) -> Any:
        """Register arrays, and tell the other agent. Returns the registration."""
        while self._removed:
            self.agent.deregister_memory(self._removed.pop())
        registered = self.agent.register_memory([(each.ctypes.data, each.nbytes, 0, "") for each in memory], "DRAM")
        self.ask("connect", self.agent.get_agent_metadata())
        return registered

    def remove(self, registered: Any) -> None:
        """Deregister memory before the next registration, because this is called while Python collects objects."""
        self._removed.append(registered)

    def wait_for(self, notifications: set[bytes]) -> None:
        """Wait until NIXL has delivered these notifications."""
        while notifications - self._delivered:
            for found in self.agent.get_new_notifs().values():
                self._delivered.update(found)
        self._delivered -= notifications

    def new_notification(self) -> bytes:
        return b"%d" % next(self._numbers)


def _end(process: Any) -> None:
    process.kill()
    process.join()


class _Memory:
    """The reference backend, which keeps the arrays that it allocates."""

    def __init__(self) -> None:
        self.arrays = list[Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)

    def zeros(self, shape: Any, dtype: Any) -> Any:
        kind = reference.zeros((1,), dtype).dtype
        memory = np.zeros(max(1, prod(shape) * kind.itemsize), np.uint8)  # NIXL registers no empty memory
        self.arrays.append(memory)
        return memory[: prod(shape) * kind.itemsize].view(kind).reshape(shape)


class NixlTransfers(NumpyArrays):
    name = "nixl-transfers"
    version = version("nixl")
    language = "python"
    project = "nixl"
    formats = PLAIN_DTYPES
    limits: ClassVar[dict[str, Any]] = {"threads": False}  # all caches share one pipe to the other process

    def __init__(self) -> None:
        self._agents = Agents()

    def transfer(self, **config: Any) -> "NixlTransferCache":
        return NixlTransferCache(kvref.TransferConfig(**config), self._agents)


class NixlTransferCache(kvref.TransferCache):
    def __init__(self, config: kvref.TransferConfig, agents: Agents) -> None:
        memory = _Memory()
        super().__init__(config, memory)
        self._agents, self._memory = agents, memory.arrays  # keys and values of each rank
        weakref.finalize(self, agents.remove, agents.register(self._memory))
        self._posted, self._by_nixl = set[bytes](), False
        self._kind = np.dtype(self._stores[0].keys.stored([]).codes.dtype)
        self._each = config.num_kv_heads // config.head_ranks  # heads of a rank

    def arrive(self, transfer: int, layer: int, start: int, heads: Any, keys: Any, values: Any) -> None:
        with self._moved_by_nixl():
            super().arrive(transfer, layer, start, heads, keys, values)

    def write_late(self, transfer: int, layer: int, start: int, heads: Any, keys: Any, values: Any) -> None:
        with self._moved_by_nixl():
            super().write_late(transfer, layer, start, heads, keys, values)

    def send(self, handle: int, layer: int, tokens: Any, heads: Any) -> Any:
        with self._moved_by_nixl():
            return super().send(handle, layer, tokens, heads)

    def commit(self, transfer: int) -> int:
        self._wait()
        return super().commit(transfer)

    def fence(self, transfer: int) -> None:
        self._wait()
        super().fence(transfer)

    @contextmanager
    def _moved_by_nixl(self) -> Any:
        self._by_nixl = True
        try:
            yield
        finally:
            self._by_nixl = False

    def _wait(self) -> None:
        self._agents.wait_for(self._posted)
        self._posted.clear()

    def _write(self, slots: Any, heads: range, keys: Any, values: Any) -> None:
        if not self._by_nixl:
            super()._write(slots, heads, keys, values)
        elif len(slots) and len(heads):
            format = get_format(self.config.dtype)
            pairs = [reference.quantize(np.asarray(each), format).codes for each in (keys, values)]
            spans, rows = list[tuple[int, int]](), list[bytes]()
            for rank, part in self._ranks_of(heads):
                for which, codes in enumerate(pairs):
                    spans += self._spans(
                        2 * rank + which, slots, range(part.start % self._each, part.start % self._each + len(part))
                    )
                    rows.append(codes[:, part.start - heads.start : part.stop - heads.start].tobytes())
            self._posted.add(notification := self._agents.new_notification())
            self._agents.ask("write", b"".join(rows), spans, notification)

    def _read(self, table: int, layer: int, positions: range) -> Any:
        if not self._by_nixl or not len(positions):
            return super()._read(table, layer, positions)
        slots = self._tables.slots(table, layer, np.arange(positions.start, positions.stop))
        shape = len(self._memory), len(slots), self._each, self.config.head_dim
        spans = [span for memory in range(shape[0]) for span in self._spans(memory, slots, range(self._each))]
        read = np.frombuffer(self._agents.ask("read", spans), self._kind).reshape(shape)
        rows = reference.dequantize(kvref.Quantized(read, None, None), self.config.head_dim, get_format(self.config.dtype))
        return tuple(np.concatenate(list(rows[which::2]), axis=1) for which in (0, 1))

    def _ranks_of(self, heads: range) -> Any:
        """Each rank that has one of these heads, and which of them."""
        for rank in range(self.config.head_ranks):
            part = range(max(heads.start, rank * self._each), min(heads.stop, (rank + 1) * self._each))
            if len(part):
                yield rank, part

    def _spans(self, memory: int, slots: Any, heads: range) -> list[tuple[int, int]]:
        """Address and number of bytes of these heads of a rank, per slot."""
        head = self.config.head_dim * self._kind.itemsize
        start = self._memory[memory].ctypes.data + heads.start * head
        return [(start + int(slot) * self._each * head, len(heads) * head) for slot in slots]
