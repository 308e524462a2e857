"""Wrong kernels."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.mutant import mutant


@mutant("KERN-08")
class KernelsCastTheirSlots(kvref.ReferenceBackend):
    """Slots are cast to integers without a check: 1.9 becomes slot 1, and a boolean mask of tokens becomes slots 0 and 1."""

    def scatter(self, store: Any, slots: Any, new: Any) -> Any:
        return super().scatter(store, np.asarray(slots, np.int64), new)

    def gather(self, store: Any, slots: Any, out: Any = None) -> Any:
        return super().gather(store, np.asarray(slots, np.int64), out)


@mutant("KERN-09")
class KernelsCopyBlockByBlock(kvref.ReferenceBackend):
    """Blocks are copied in order.

    A block that is the target of one copy and the source of the next passes on its new contents.
    """

    def copy(self, store: Any, sources: Any, targets: Any, block_size: int = 1) -> Any:
        if len(sources) != len(targets):
            return super().copy(store, sources, targets, block_size)
        for number in range(len(sources)):
            one = slice(number, number + 1)
            store = super().copy(store, sources[one], targets[one], block_size)
        return store


@mutant("KERN-04", also="KERN-01 KERN-02 KERN-08 KERN-09")
class KernelsFlushNanBits(kvref.ReferenceBackend):
    """Tokens pass through floating-point arithmetic when they are written: the payloads of NaNs are lost."""

    def scatter(self, store: Any, slots: Any, new: Any) -> Any:
        store = super().scatter(store, slots, new)
        if store.dtype == np.float32:
            store[np.isnan(store)] = np.float32(np.nan)
        return store


@mutant("KERN-03", also="KERN-08", seen_in="flashinfer-ai/flashinfer#3647")
class KernelsPastTheEnd(kvref.ReferenceBackend):
    """A slot past the end is detected only when it is reached: the tokens before it are already written."""

    def scatter(self, store: Any, slots: Any, new: Any) -> Any:
        if len(slots) == len(new):
            for slot, token in zip(slots, new, strict=True):
                store = super().scatter(store, np.array([slot]), token[None])
            return store
        return super().scatter(store, slots, new)


@mutant("KERN-02", also="KERN-08", seen_in="huggingface/transformers#46765")
class KernelsWritePadding(kvref.ReferenceBackend):
    """The slot -1 of a padding token is counted from the end: the last token of the store is overwritten."""

    def scatter(self, store: Any, slots: Any, new: Any) -> Any:
        return super().scatter(store, np.where(slots < 0, slots % len(store), slots), new)
