"""Adapters of PyTorch's indexing as slot kernels, on the CPU: the operations from which caches in PyTorch are built.

`torch-kernels` scatters with `index_copy_` and gathers with `index_select`, like transformers' StaticCache and LitGPT;
`torch-kernels-put` scatters by index assignment, like torchtune, where negative slots count from the end. An update is the
assignment to a slice. Blocks are a view of the store, whole blocks only. Slots are passed unchanged: nothing is checked or cast.
"""

from typing import Any

import torch

from kvref.errors import DtypeMismatch, ShapeMismatch, SlotOutOfRange
from kvref_conformance.interface import Level


class IndexCopy:
    name = "torch-kernels"
    version = str(torch.__version__)
    language = "c++"
    project = "torch"
    level: Level = "exact"
    formats = ("float32",)

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def asarray(self, values: Any) -> Any:
        return torch.tensor(values)

    def to_numpy(self, array: Any) -> Any:
        return array.numpy()

    def kernels(self) -> "IndexCopy":
        return self

    def scatter(self, store: Any, slots: Any, new: Any) -> Any:
        try:
            self._put(store, slots, new)
        except (RuntimeError, IndexError) as error:
            raise _in_our_words(error) from error
        return store

    def gather(self, store: Any, slots: Any) -> Any:
        try:
            return self._take(store, slots)
        except (RuntimeError, IndexError) as error:
            raise _in_our_words(error) from error

    def copy(self, store: Any, sources: Any, targets: Any, block_size: int) -> Any:
        count = len(store) // block_size
        blocks = store[: count * block_size].view(count, block_size, *store.shape[1:])
        self.scatter(blocks, targets, self.gather(blocks, sources))
        return store

    def update(self, buffer: Any, new: Any, position: int) -> Any:
        try:
            buffer[:, :, position : position + new.shape[2]] = new
        except RuntimeError as error:
            raise _in_our_words(error) from error
        return buffer

    def _put(self, store: Any, slots: Any, new: Any) -> None:
        store.index_copy_(0, slots, new)

    def _take(self, store: Any, slots: Any) -> Any:
        return store.index_select(0, slots)


class IndexPut(IndexCopy):
    name = "torch-kernels-put"

    def _put(self, store: Any, slots: Any, new: Any) -> None:
        store[slots] = new

    def _take(self, store: Any, slots: Any) -> Any:
        return store[slots]


def _in_our_words(error: Exception) -> Exception:
    said = str(error)
    if "out of bounds" in said or "out of range" in said:
        return SlotOutOfRange(said)
    if any(word in said for word in ("dtype", "scalar type", "Expected a long tensor", "tensors used as indices")):
        return DtypeMismatch(said)
    return ShapeMismatch(said)
