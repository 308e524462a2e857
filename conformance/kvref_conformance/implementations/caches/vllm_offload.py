"""Adapter of vLLM's CPUOffloadingManager, by its own calls, as the bookkeeping of a host store; without tensors.

It manages which keys are stored and in which chunks of host memory; a worker does the copies. A key is its bytes, of group 0.
Every call is a request of its own, whose keys have positions, as from the scheduler, and holds the manager's lock, as the manager
requires. Here the lock does nothing, because the manager is single-threaded; calls from several threads are *not offered*.

- `lookup` requests key after key until one is no HIT. `prepare_store` is its own method; None means that there is no room.
- `places` are the chunks that its policy has for the keys, `num_free` is its own count: neither is public.
- Its assertions about keys (cached, ready, being loaded) are mapped to KeyNotFound.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from kvref.errors import KeyNotFound, OutOfBlocks
from kvref_conformance.implementations.caches.vllm_blocks import Managed
from kvref_conformance.outcome import NotOffered

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key  # isort: skip
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager  # isort: skip

KEY_BYTES = 8


class Offload(Managed):
    name = "vllm-offload"

    def offload(self, capacity: int) -> "Store":
        return Store(capacity)


class Store:
    def __init__(self, capacity: int) -> None:
        self._manager = CPUOffloadingManager(num_chunks=int(capacity))  # an int, as the engine computes it from bytes
        self._thread = get_ident()

    @property
    def num_free(self) -> int:
        return int(self._manager._get_num_free_chunks())

    def lookup(self, keys: Sequence[int]) -> int:
        with self._asked(keys) as (names, request):
            missing = (count for count, key in enumerate(names) if self._manager.lookup(key, request) is not LookupResult.HIT)
            return next(missing, len(keys))

    def places(self, keys: Sequence[int]) -> list[int]:
        with self._asked(keys) as (names, _):
            chunks = [self._manager._policy.get(key) for key in names]
        if None in chunks:
            raise KeyNotFound("the policy has no such chunk")
        return [int(chunk.chunk_id) for chunk in chunks]

    def prepare_store(self, keys: Sequence[int]) -> tuple[list[int], list[int]]:
        with self._asked(keys) as (names, request):
            prepared = self._manager.prepare_store(names, request)
        if prepared is None:
            raise OutOfBlocks("prepare_store returned None")
        return [_number(key) for key in prepared.keys_to_store], [_number(key) for key in prepared.evicted_keys]

    def complete_store(self, keys: Sequence[int], success: bool = True) -> None:
        with self._asked(keys) as (names, request):
            self._manager.complete_store(names, request, success)

    def prepare_load(self, keys: Sequence[int]) -> None:
        with self._asked(keys) as (names, request):
            self._manager.prepare_load(names, request)

    def complete_load(self, keys: Sequence[int]) -> None:
        with self._asked(keys) as (names, request):
            self._manager.complete_load(names, request)

    def touch(self, keys: Sequence[int]) -> None:
        with self._asked(keys) as (names, request):
            self._manager.touch(names, request)

    @contextmanager
    def _asked(self, keys: Sequence[int]) -> Iterator[tuple[list[Any], Any]]:
        """Return the keys as the manager's type, and a request that has them."""
        if get_ident() != self._thread:
            raise NotOffered("calls from several threads: its lock does nothing")
        names, request = [make_offload_key(int(key).to_bytes(KEY_BYTES, "big"), 0) for key in keys], ReqContext(req_id="")
        for position, name in enumerate(names):
            request.set_offload_key_position(name, position + 1)
        try:
            with self._manager.lock:
                yield names, request
        except AssertionError as error:
            raise KeyNotFound(str(error)) from error


def _number(key: bytes) -> int:
    return int.from_bytes(key[:KEY_BYTES], "big")
