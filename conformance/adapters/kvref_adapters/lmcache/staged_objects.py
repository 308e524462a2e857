"""Adapter of LMCache's L1Manager, the object store of its multiprocess mode, as the blocks of a transfer cache.

An object has the tokens of one block in one layer; layers are object groups. The adapter knows which objects a sequence has, and
passes rows between the caller and the tensors of the objects.

- `begin` is `reserve_write`, `commit` is `finish_write`. A writer that aborts calls nothing until its last write has ended:
  `fence` is `finish_write_and_delete`.
- `append` stores new objects (`reserve_write` and `finish_write`). An object cannot be changed. If tokens are appended to the
  last one, it is stored anew, and the old one is deleted.
- `gather` reads between `reserve_read` and `finish_read`; `export` is `reserve_read`, `send` is `unsafe_read`, `release` is
  `finish_read`. `truncate` and `drop` are `delete`, which refuses objects that are locked for reading. As LMCache's eviction
  does, the adapter tries again later: after `release`.
- `num_free_blocks` is `get_memory_usage`.

Whether all rows have arrived, and whether a row arrives twice, is known to the writer only, and is *not offered*. Neither are
deadlines: the time to live of write locks is one for all objects, and is measured by the clock of the machine.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count
from typing import Any, ClassVar

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.l1_manager import L1Manager

from kvref.errors import ExportNotFound, OutOfBlocks, SequenceNotFound, TransferNotFound
from kvref_adapters._shared.torch_arrays import TorchArrays
from kvref_conformance.exceptions import NotOffered

ALIGNMENT = 4096  # of the addresses of objects
TIME_TO_LIVE = 10**6  # of locks, in seconds
LONGEST = 10**5  # tokens of a prompt: each object has a key, also if there is no memory for it


class LMCacheStagedObjects(TorchArrays):
    name = "lmcache-staged-objects"
    version = version("lmcache")
    language = "python"
    project = "lmcache"
    limits: ClassVar[dict[str, Any]] = {
        "head_ranks": [1], "dtype": ["float32"], "num_blocks": {"least": 1}, "threads": False,
    }  # fmt: skip

    def transfer(self, **sizes: Any) -> "StagedTransfers":
        if sizes.pop("dtype") != "float32":
            raise NotOffered("validation of dtype")
        for name, value in sizes.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise NotOffered(f"validation of {name}, which comes from a model or from the free memory")
        return StagedTransfers(**sizes)


@dataclass
class Stored:
    """The objects of a sequence, per block and layer."""

    objects: list[list[ObjectKey]]
    length: int = 0


@dataclass
class Staged(Stored):
    """The objects that a writer has reserved: their tensors, and which rows of which heads were written."""

    tensors: Any = None
    arrived: Any = None


class StagedTransfers:
    def __init__(
        self, *, num_blocks: int, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int, head_ranks: int
    ) -> None:
        self._layers, self._size, self._heads, self._dim = num_layers, block_size, num_kv_heads, head_dim
        self._layout = MemoryLayoutDesc([torch.Size([2, block_size, num_kv_heads, head_dim])], [torch.float32])
        self._bytes = -(-8 * block_size * num_kv_heads * head_dim // ALIGNMENT) * ALIGNMENT  # of an object
        memory = L1MemoryManagerConfig(num_blocks * self._bytes, use_lazy=False, align_bytes=ALIGNMENT, shm_name="")
        self._manager = L1Manager(L1ManagerConfig(memory, write_ttl_seconds=TIME_TO_LIVE, read_ttl_seconds=TIME_TO_LIVE))
        weakref.finalize(self, self._manager.close)
        self._names, self._ids = count(), [count(), count(), count()]  # of objects; of sequences, transfers and exports
        self._sequences: dict[int, Stored] = {}
        self._open: dict[int, Staged] = {}
        self._aborted: dict[int, Staged] = {}
        self._ended: dict[int, Staged] = {}
        self._exports: dict[int, Stored] = {}
        self._released: dict[int, Stored] = {}
        self._locked: list[ObjectKey] = []  # objects that no sequence has, and that `delete` has refused

    @property
    def num_free_blocks(self) -> int:
        used, total = self._manager.get_memory_usage()
        return int(total - used) // self._bytes

    def create(self) -> int:
        return self._added(Stored([]))

    def append(self, sequence: int, keys: Any, values: Any) -> None:
        stored = self._sequence(sequence)
        shape = self._layers, *keys.shape[1:2], self._heads, self._dim
        if any(each.shape != shape or each.dtype != torch.float32 for each in (keys, values)):
            raise NotOffered("validation of arrays, which come from a model")
        if not keys.shape[1]:
            return
        kept = stored.length % self._size  # tokens of the last object, which is stored anew
        last = stored.objects[-1:] if kept else []
        old = self._gathered(last, kept) if kept else torch.zeros(self._layers, 2, 0, self._heads, self._dim)
        rows = torch.cat((old, torch.stack((keys, values), 1)), 2)
        staged = self._reserved(rows.shape[2], str(sequence))
        if staged is None:
            room, missing = self.num_free_blocks, self._layers * (-(-rows.shape[2] // self._size) - len(last))
            if room >= missing and not any(each in export.objects for each in last for export in self._exports.values()):
                raise NotOffered("an append to the last object without memory for both")
            raise OutOfBlocks("reserve_write returned OUT_OF_MEMORY")
        for layer in range(self._layers):
            self._write(staged, layer, 0, slice(None), rows[layer])
        self._all(self._manager.finish_write(self._flat(staged.objects), tag=str(sequence)))
        stored.objects = stored.objects[: len(stored.objects) - len(last)] + staged.objects
        stored.length += keys.shape[1]
        self._delete(last)

    def length(self, sequence: int) -> int:
        return self._sequence(sequence).length

    def gather(self, sequence: int, layer: int) -> tuple[Any, Any]:
        stored = self._sequence(sequence)
        self._layer(layer)
        keys, values = self._gathered(stored.objects, stored.length)[layer]
        return keys, values

    def truncate(self, sequence: int, length: int) -> None:
        stored, length = self._sequence(sequence), int(length)
        if not 0 <= length <= stored.length:
            raise NotOffered("validation of a length")
        kept = -(-length // self._size)
        gone, stored.objects, stored.length = stored.objects[kept:], stored.objects[:kept], length
        self._delete(gone)

    def drop(self, sequence: int) -> None:
        stored = self._sequence(sequence)
        del self._sequences[sequence]
        self._delete(stored.objects)

    def begin(self, length: int, deadline: int | None = None) -> int:
        if not 0 <= length <= LONGEST or deadline is not None:
            raise NotOffered("validation of a length, millions of keys, and a deadline")
        transfer = next(self._ids[1])
        staged = self._reserved(int(length), f"transfer {transfer}")
        if staged is None:
            raise OutOfBlocks("reserve_write returned OUT_OF_MEMORY")
        self._open[transfer] = staged
        return transfer

    def arrive(self, transfer: int, layer: int, start: int, heads: Any, keys: Any, values: Any) -> None:
        if transfer not in self._open:
            raise NotOffered("rejecting a write to memory that was reserved before")
        staged, start, heads = self._open[transfer], int(start), [int(each) for each in heads]
        self._layer(layer)
        stop, shape = start + len(keys), (len(keys), max(0, heads[1] - heads[0]), self._dim)
        fits = 0 <= start <= stop <= staged.length and 0 <= heads[0] <= heads[1] <= self._heads
        if not fits or any(each.shape != shape or each.dtype != torch.float32 for each in (keys, values)):
            raise NotOffered("validation of a part: the writer computes the places")
        part = layer, slice(start, stop), slice(*heads)
        if staged.arrived[part].any():
            raise NotOffered("rejecting a second write to reserved memory")
        staged.arrived[part] = True
        self._write(staged, layer, start, part[2], torch.stack((keys, values)))

    def commit(self, transfer: int) -> int:
        if transfer in self._open and not self._open[transfer].arrived.all():
            raise NotOffered("rejecting an incomplete transfer: the writer knows what it has written")
        if transfer in self._aborted:
            raise NotOffered("rejecting the commit of a writer that has aborted")
        staged = self._finished(transfer, self._open, self._manager.finish_write)
        return self._added(Stored(staged.objects, staged.length))

    def abort(self, transfer: int) -> None:
        if transfer in self._aborted:
            raise NotOffered("rejecting a second abort, for which a writer calls nothing")
        if transfer in self._open:
            self._aborted[transfer] = self._open.pop(transfer)
        else:
            self._finished(transfer, {}, self._manager.finish_write_and_delete)

    def fence(self, transfer: int) -> None:
        if transfer in self._open:
            raise NotOffered("rejecting the fence of a writer that has not aborted: it is the abort")
        self._finished(transfer, self._aborted, self._manager.finish_write_and_delete)

    def export(self, sequence: int) -> int:
        stored = self._sequence(sequence)
        self._all({key: error for key, (error, _) in self._manager.reserve_read(self._flat(stored.objects)).items()})
        handle = next(self._ids[2])
        self._exports[handle] = Stored(list(stored.objects), stored.length)
        return handle

    def send(self, handle: int, layer: int, tokens: Any, heads: Any) -> tuple[Any, Any]:
        exported = self._exported(handle)
        self._layer(layer)
        if not 0 <= tokens[0] <= tokens[1] <= exported.length or not 0 <= heads[0] <= heads[1] <= self._heads:
            raise NotOffered("validation of ranges: objects are read whole")
        found = self._manager.unsafe_read(self._flat(exported.objects))
        if any(memory is None for _, memory in found.values()):
            raise ExportNotFound("unsafe_read returned KEY_NOT_READABLE or KEY_NOT_EXIST")
        keys, values = self._rows(exported.objects, exported.length, found)[layer, :, slice(*tokens), slice(*heads)]
        return keys, values

    def release(self, handle: int) -> None:
        exported = self._exported(handle)
        if any(error != L1Error.SUCCESS for error in self._manager.finish_read(self._flat(exported.objects)).values()):
            raise ExportNotFound("finish_read returned KEY_IN_WRONG_STATE or KEY_NOT_EXIST")
        if handle in self._exports:
            self._released[handle] = self._exports.pop(handle)
        self._delete([])

    def _added(self, stored: Stored) -> int:
        sequence = next(self._ids[0])
        self._sequences[sequence] = stored
        return sequence

    def _new_objects(self, length: int) -> list[list[ObjectKey]]:
        blocks = range(-(-length // self._size))
        return [
            [ObjectKey(next(self._names).to_bytes(8, "big"), "model", 0, layer) for layer in range(self._layers)] for _ in blocks
        ]

    def _reserved(self, length: int, writer: str) -> Staged | None:
        """Reserve objects for this number of tokens. Returns None if there is too little memory."""
        objects = self._new_objects(length)
        flat = self._flat(objects)
        found = self._manager.reserve_write(flat, [False] * len(flat), self._layout, tag=writer)
        if any(error == L1Error.OUT_OF_MEMORY for error, _ in found.values()):
            return None
        self._all({key: error for key, (error, _) in found.items()})
        tensors = [[found[key][1].tensor for key in each] for each in objects]
        return Staged(objects, length, tensors, torch.zeros(self._layers, length, self._heads, dtype=torch.bool))

    def _write(self, staged: Staged, layer: int, start: int, heads: slice, rows: Any) -> None:
        for at in range(rows.shape[1]):
            block, slot = divmod(start + at, self._size)
            staged.tensors[block][layer][:, slot, heads] = rows[:, at]

    def _finished(self, transfer: int, among: dict[int, Staged], end: Callable[..., dict[ObjectKey, L1Error]]) -> Staged:
        """End the reservation of a transfer. One that has ended, or never began, is rejected by LMCache."""
        staged = among.get(transfer) or self._ended.get(transfer) or Staged(self._new_objects(1))
        errors = end(self._flat(staged.objects), tag=f"transfer {transfer}")
        if L1Error.KEY_NOT_EXIST in errors.values() or transfer not in among:
            raise TransferNotFound(f"{errors}")
        self._all(errors)
        self._ended[transfer] = among.pop(transfer)
        return staged

    def _gathered(self, objects: list[list[ObjectKey]], length: int) -> Any:
        flat = self._flat(objects)
        found = self._manager.reserve_read(flat)
        rows = self._rows(objects, length, found)
        self._all(self._manager.finish_read(flat))
        return rows

    def _rows(self, objects: list[list[ObjectKey]], length: int, found: Any) -> Any:
        """Keys and values of the tokens of all layers: [num_layers, 2, length, num_kv_heads, head_dim]."""
        layers = [[found[each[layer]][1].tensor for each in objects] for layer in range(self._layers)]
        empty = torch.zeros(2, 0, self._heads, self._dim)
        return torch.stack([torch.cat((empty, *each), 1)[:, :length] for each in layers])

    def _delete(self, objects: Iterable[list[ObjectKey]]) -> None:
        self._locked += self._flat(objects)
        errors = self._manager.delete(self._locked)
        self._locked = [key for key, error in errors.items() if error == L1Error.KEY_IS_LOCKED]

    def _sequence(self, sequence: int) -> Stored:
        if sequence not in self._sequences:
            raise SequenceNotFound("no such objects")
        return self._sequences[sequence]

    def _exported(self, handle: int) -> Stored:
        """The objects of an export, also of one that was released: LMCache rejects it. If it had none, an unknown object."""
        if handle in self._exports:
            return self._exports[handle]
        released = self._released.get(handle)
        return released if released and released.objects else Stored(self._new_objects(1), LONGEST)

    def _layer(self, layer: int) -> None:
        if not 0 <= layer < self._layers:
            raise NotOffered("validation of the layer number")

    @staticmethod
    def _flat(objects: Iterable[Sequence[ObjectKey]]) -> list[ObjectKey]:
        return [key for each in objects for key in each]

    @staticmethod
    def _all(errors: dict[ObjectKey, L1Error]) -> None:
        if any(error != L1Error.SUCCESS for error in errors.values()):
            raise RuntimeError(f"an object was refused: {set(errors.values())}")
