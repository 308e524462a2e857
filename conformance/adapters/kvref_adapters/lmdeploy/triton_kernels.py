"""Adapters of LMDeploy's Triton kernels in Triton's interpreter: `lmdeploy-triton-cache`, `-triton-rows` and `-triton-copy`.

- `lmdeploy-triton-cache` is a batch of sequences in blocks of 8 tokens: `append` is `fill_kv_cache`, and `read` is
  `flatten_kv_cache` over the tokens so far. The block tables are fixed, because the kernels allocate nothing.
- `lmdeploy-triton-rows` runs the same two kernels with a quantization policy over rows, each of which is a key and a value of a
  token of one head. Zeros are in units of codes, so that a row is returned as bytes (codes, scale, zero), and its dequantized
  values are judged. In the static formats the scale is given.
- `copy` of `lmdeploy-triton-copy` is `copy_cache_blocks`.

Only the files of the kernels are imported. A module replaces `lmdeploy.messages`, of which they use the numbers of the policies.
"""

import sys
from enum import IntEnum
from importlib.metadata import version
from types import ModuleType
from typing import Any, ClassVar

import kvref_adapters._shared.triton_interpreter  # noqa: F401 - before LMDeploy
from kvref.errors import PositionOutOfRange
from kvref_adapters._shared.import_stubs import install_stubs
from kvref_adapters._shared.torch_arrays import OneThreadTorch, TorchRows, bytes_as_fp8, fp8_as_bytes
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import Level


class QuantPolicy(IntEnum):
    NONE, INT4, INT8, FP8, FP8_E5M2, TURBO_QUANT = 0, 4, 8, 16, 17, 42


messages = ModuleType("lmdeploy.messages")
vars(messages)["QuantPolicy"] = QuantPolicy
sys.modules["lmdeploy.messages"] = messages
install_stubs((), ("lmdeploy", "lmdeploy.pytorch", "lmdeploy.pytorch.kernels", "lmdeploy.pytorch.kernels.cuda"))

import torch  # noqa: E402
from lmdeploy.pytorch.kernels.cuda.copy_cache import copy_cache_blocks  # noqa: E402
from lmdeploy.pytorch.kernels.cuda.fill_kv_cache import fill_kv_cache  # noqa: E402
from lmdeploy.pytorch.kernels.cuda.flatten_kv_cache import flatten_kv_cache  # noqa: E402

BLOCK = 8  # tokens
POLICIES = {
    "q8": QuantPolicy.INT8, "q4": QuantPolicy.INT4,
    "float8_e4m3fn_static": QuantPolicy.FP8, "float8_e5m2_static": QuantPolicy.FP8_E5M2,
}  # fmt: skip


class LMDeployTriton(OneThreadTorch):
    version = f"{version('lmdeploy')}, triton {version('triton')}, interpreted"
    language = "triton"
    project = "lmdeploy"
    limits: ClassVar[dict[str, Any]] = {"dtype": ["float32"], "threads": False}


class LMDeployTritonCache(LMDeployTriton):
    name = "lmdeploy-triton-cache"
    # the capacity is always the maximum length
    limits: ClassVar[dict[str, Any]] = {
        **LMDeployTriton.limits, "tokens": {"least": 1}, "initial_capacity": {"least": 4096}, "max_seq_len": {"most": 4096},
    }  # fmt: skip

    def contiguous(self, **config: Any) -> "Batch":
        return Batch(**config)


class Batch:
    def __init__(
        self, batch_size: int, num_kv_heads: int, head_dim: int, initial_capacity: int, max_seq_len: int, dtype: str
    ) -> None:  # fmt: skip
        sizes = (batch_size, num_kv_heads, head_dim, max_seq_len)
        valid = all(type(size) is int and size > 0 for size in sizes) and type(initial_capacity) is int and initial_capacity >= 0
        if not valid or dtype != "float32":
            raise NotOffered("validation of sizes: they come from the model and the available memory")
        self._shape, self._most = (batch_size, num_kv_heads, head_dim), max_seq_len
        blocks = -(-max_seq_len // BLOCK)
        self._keys, self._values = (torch.full((batch_size * blocks, BLOCK, num_kv_heads, head_dim), torch.nan) for _ in range(2))
        self._table = torch.arange(batch_size * blocks - 1, -1, -1).reshape(blocks, batch_size).T.contiguous()
        self.seq_len = 0

    def append(self, keys: Any, values: Any) -> None:
        count, (batch, heads, width) = keys.shape[2] if keys.ndim == 4 else 0, self._shape
        if any(array.shape != (batch, heads, count, width) or array.dtype != torch.float32 for array in (keys, values)):
            raise NotOffered("rejecting other shapes and dtypes: one projection of the model produces keys and values")
        if self.seq_len + count > self._most:
            raise NotOffered("rejecting more tokens than fit: the scheduler counts them")
        packed = [array.transpose(1, 2).reshape(batch * count, heads, width) for array in (keys, values)]
        each = torch.full((batch,), count)
        fill_kv_cache(
            *packed, self._keys, self._values, torch.arange(batch) * count, each, each + self.seq_len, count, self._table
        )  # fmt: skip
        self.seq_len += count

    def read(self) -> tuple[Any, Any]:
        batch, heads, width = self._shape
        lengths = torch.full((batch,), self.seq_len)
        flat = flatten_kv_cache(self._keys, self._values, lengths, self._table, out_size=batch * self.seq_len)
        keys, values = (
            part[:, : batch * self.seq_len].reshape(heads, batch, self.seq_len, width).transpose(0, 1) for part in flat
        )
        return keys, values

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self.seq_len:
            raise PositionOutOfRange(length)
        self.seq_len = int(length)

    def reset(self) -> None:
        self.seq_len = 0


class LMDeployTritonRows(TorchRows, LMDeployTriton):
    name = "lmdeploy-triton-rows"
    language = "triton"
    level: Level = "tolerant"  # its zeros are rounded in units of codes
    formats = tuple(POLICIES)
    limits: ClassVar[dict[str, Any]] = {**LMDeployTriton.limits, "width": {"multiple_of": 2}}

    def rows(self, *, given_scale: float | None = None) -> "RowsOfTokens":  # type: ignore[override]
        return RowsOfTokens(1.0 if given_scale is None else given_scale)


class RowsOfTokens:
    def __init__(self, given_scale: float) -> None:
        if not 0 < given_scale < float("inf"):
            raise NotOffered("validation of the scale, which comes from the checkpoint")
        self._scale = torch.tensor([given_scale], dtype=torch.float32)

    def quantize(self, rows: Any, format: str) -> tuple[Any, None, None]:
        if rows.ndim != 2 or not rows.shape[1]:
            raise NotOffered("rejecting other shapes: one projection of the model produces the rows")
        count, width = rows.shape
        blocks, table = _blocks(count)
        stored = width // 2 if format == "q4" else width
        dtype = getattr(torch, format.removesuffix("_static")) if format.endswith("_static") else torch.uint8
        caches = [torch.zeros(blocks, BLOCK, 1, stored, dtype=dtype) for _ in range(2)]
        scales = [torch.zeros(blocks, BLOCK, 1, 2) for _ in range(2)] if dtype == torch.uint8 else [self._scale] * 2
        tokens, length = rows[:, None], torch.tensor([count])
        fill_kv_cache(
            tokens, tokens, *caches, torch.tensor([0]), length, length, max(count, 2), table, *scales, POLICIES[format]
        )  # fmt: skip
        codes = fp8_as_bytes(caches[0]).reshape(-1, stored)[:count]
        if dtype != torch.uint8:
            return codes, None, None
        return torch.cat([codes, scales[0].view(torch.uint8).reshape(-1, 8)[:count]], dim=1), None, None

    def dequantize(self, codes: Any, scale: None, zero: None, width: int, format: str) -> Any:
        count = len(codes)
        blocks, table = _blocks(count)
        padded = torch.zeros(blocks * BLOCK, codes.shape[1], dtype=torch.uint8)
        padded[:count] = codes
        if format.endswith("_static"):
            cache, scales = bytes_as_fp8(padded, format.removesuffix("_static")), self._scale
        else:
            cache, scales = padded[:, :-8].contiguous(), padded[:, -8:].contiguous().view(torch.float32)
            scales = scales.view(blocks, BLOCK, 1, 2)
        cache = cache.view(blocks, BLOCK, 1, -1)
        keys, _ = flatten_kv_cache(
            cache, cache.clone(), torch.tensor([count]), table, out_size=count, out_dtype=torch.float32, k_scales_zeros=scales,
            v_scales_zeros=scales, quant_policy=POLICIES[format],
        )  # fmt: skip
        return keys[0, :count]


def _blocks(count: int) -> tuple[int, Any]:
    """Return the number of blocks of `count` tokens, at least one, and their table."""
    blocks = max(1, -(-count // BLOCK))
    return blocks, torch.arange(blocks)[None]


class LMDeployTritonCopy(LMDeployTriton):
    name = "lmdeploy-triton-copy"

    def kernels(self) -> "LMDeployTritonCopy":
        return self

    def copy(self, store: Any, sources: Any, targets: Any, block_size: int) -> Any:
        copy_cache_blocks(store, 0, torch.as_tensor(sources), torch.as_tensor(targets), block_size)
        return store
