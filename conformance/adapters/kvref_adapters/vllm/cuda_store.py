"""Adapter of the CUDA kernel that writes vLLM's paged cache: `vllm-cuda-store`. Not run yet: see docs/on-a-gpu.md.

`scatter` is `reshape_and_cache_flash`, as in `vllm-triton-store`.
"""

from importlib.metadata import version
from typing import Any, ClassVar

import torch
from vllm import _custom_ops

from kvref_adapters._shared.cuda_arrays import CudaArrays, check_slots
from kvref_conformance.exceptions import NotOffered

BLOCK = 16  # slots


class VllmCudaStore(CudaArrays):
    name = "vllm-cuda-store"
    version: ClassVar[str] = version("vllm")
    project = "vllm"
    limits: ClassVar[dict[str, Any]] = {"dtype": ["float16"], "block_size": BLOCK}

    def kernels(self) -> "VllmCudaStore":
        return self

    def scatter(self, store: Any, slots: Any, new: Any) -> Any:
        if slots.dtype != torch.int64:
            raise NotOffered("slots of other types than int64, which vLLM's slots have")
        check_slots(store, slots[slots >= 0])  # negative slots are padding
        if new.shape[1:] != store.shape[1:] or len(new) != len(slots) or new.dtype != store.dtype or len(store) % BLOCK:
            raise NotOffered("tokens of another shape or dtype than the store, and stores without whole blocks")
        caches = [each.unflatten(0, (-1, BLOCK)) for each in (store, store.clone())]
        scale = torch.ones(1, device=store.device)
        _custom_ops.reshape_and_cache_flash(new, new, *caches, slots, "auto", scale, scale)
        return store

    def gather(self, store: Any, slots: Any) -> Any:
        check_slots(store, slots)
        return store[slots.long()]
