"""Adapters of vLLM's Triton kernels that write its paged cache: `vllm-triton-store`, `-store-bfloat16` and `-store-rows`.

`scatter` is `triton_reshape_and_cache_flash`, with the same tokens as keys and as values, into a store in blocks of 4 slots. The
cache is read by plain indexing, because vLLM reads it in its attention kernels only; invalid slots are therefore not gathered.
vLLM has no such kernel for `update`, and copies blocks with a function of CUDA.

`quantize` of a row in `int8` and `float8_e4m3fn` is `triton_reshape_and_cache_flash_per_token_head_quant`, with a row as the key
of a token of one head. In the static formats it is `triton_reshape_and_cache_flash` with `k_scale`. Codes are multiplied by their
scale as vLLM's attention does.
"""

from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import torch

from kvref_adapters._shared.torch_arrays import INT8, TorchRows, bytes_as_fp8, fp8_as_bytes
from kvref_adapters.vllm.triton_platform import VllmTriton
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import Level

from vllm.v1.attention.ops.triton_reshape_and_cache_flash import (  # isort: skip - after the platform
    triton_reshape_and_cache_flash,
    triton_reshape_and_cache_flash_per_token_head_quant,
)
from vllm.v1.kv_cache_interface import KVQuantMode  # isort: skip

BLOCK = 4  # slots
ONE = torch.ones(1)  # a scale
MODES = {INT8: KVQuantMode.INT8_PER_TOKEN_HEAD, "float8_e4m3fn": KVQuantMode.FP8_PER_TOKEN_HEAD}
STATIC = {"float8_e4m3fn_static": ("fp8", "float8_e4m3fn"), "float8_e5m2_static": ("fp8_e5m2", "float8_e5m2")}


class VllmTritonStore(VllmTriton):
    name = "vllm-triton-store"
    limits: ClassVar[dict[str, Any]] = {"dtype": ["float32"], "block_size": BLOCK, "threads": False}

    def kernels(self) -> "VllmTritonStore":
        return self

    def scatter(self, store: Any, slots: Any, new: Any) -> Any:
        caches = [each.view(-1, BLOCK, *store.shape[1:]) for each in (store, store.clone())]
        triton_reshape_and_cache_flash(new, new, *caches, slots, "auto", ONE, ONE)
        return store

    def gather(self, store: Any, slots: Any) -> Any:
        numbers = torch.as_tensor(slots)
        if numbers.dtype.is_floating_point or numbers.dtype == torch.bool or numbers.ndim != 1:
            raise NotOffered("gathering malformed slots: vLLM has no kernel that gathers")
        numbers = numbers.to(torch.int64)
        if ((numbers < 0) | (numbers >= len(store))).any():
            raise NotOffered("gathering slots outside the store: vLLM has no kernel that gathers")
        return store[numbers]


class VllmTritonStoreBFloat16(VllmTritonStore):
    name = "vllm-triton-store-bfloat16"
    formats = ("bfloat16",)
    limits: ClassVar[dict[str, Any]] = {"dtype": ["bfloat16"], "block_size": BLOCK, "threads": False}

    def asarray(self, values: Any) -> Any:
        values = np.asarray(values)
        if values.dtype != ml_dtypes.bfloat16:
            return torch.tensor(values)
        return torch.tensor(values.view(np.int16)).view(torch.bfloat16)  # torch does not accept ml_dtypes' bfloat16

    def to_numpy(self, array: Any) -> Any:
        bits = array.view(torch.int16).numpy() if array.dtype == torch.bfloat16 else array.numpy()
        return bits.view(ml_dtypes.bfloat16) if array.dtype == torch.bfloat16 else bits


class VllmTritonStoreRows(TorchRows, VllmTriton):
    name = "vllm-triton-store-rows"
    language = "triton"
    level: Level = "tolerant"  # multiplies by the reciprocal of the scale
    formats = (*MODES, *STATIC)
    limits: ClassVar[dict[str, Any]] = {"dtype": ["float32"], "threads": False}

    def rows(self, *, given_scale: float | None = None) -> "RowsOfTokens":  # type: ignore[override]
        return RowsOfTokens(1.0 if given_scale is None else given_scale)


class RowsOfTokens:
    def __init__(self, given_scale: float) -> None:
        if not 0 < given_scale < float("inf"):
            raise NotOffered("validation of the scale, which comes from the checkpoint")
        self._scale = torch.tensor([given_scale], dtype=torch.float32)

    def quantize(self, rows: Any, format: str) -> tuple[Any, Any | None, None]:
        tokens, element = rows[:, None, :], STATIC.get(format, (None, format))[1]
        dtype = torch.uint8 if format in STATIC else getattr(torch, element)  # as vLLM allocates them
        caches = [torch.zeros(len(rows), 1, 1, rows.shape[1], dtype=dtype) for _ in range(2)]
        slots = torch.arange(len(rows))
        if format in STATIC:
            triton_reshape_and_cache_flash(tokens, tokens, *caches, slots, STATIC[format][0], self._scale, self._scale)
            return fp8_as_bytes(caches[0][:, 0, 0]), None, None
        scales = [torch.zeros(len(rows), 1, 1) for _ in range(2)]
        triton_reshape_and_cache_flash_per_token_head_quant(tokens, tokens, *caches, *scales, slots, MODES[format])
        return fp8_as_bytes(caches[0][:, 0, 0]), scales[0][:, 0, 0], None

    def dequantize(self, codes: Any, scale: Any, zero: None, width: int, format: str) -> Any:
        if format in STATIC:
            return bytes_as_fp8(codes, STATIC[format][1]).float() * self._scale
        return bytes_as_fp8(codes, format).float() * scale[:, None]
