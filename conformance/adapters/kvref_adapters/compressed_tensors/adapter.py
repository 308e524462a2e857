"""Adapters of compressed-tensors: quantizers with one scale per token, and the hook that quantizes a model's cache.

`compressed-tensors`: rows are the tokens of one sequence, [1, tokens, width], like an activation. Scales come from
`compute_dynamic_scales_and_zp`, codes from `quantize`, and values from `dequantize`. `compressed-tensors-groups`: the strategy
"group", with a scale dtype per format. `compressed-tensors-kv`: one `QuantizedKVCache` per layer in front of a shared
DynamicCache, set up as `initialize_hooked_kv_cache` and its attention hook do. That DynamicCache contains dequantized values in
the dtype of the tokens, so memory_bytes is not offered. The adapter validates nothing.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any, ClassVar

import torch
from compressed_tensors.modeling.kvcache import QuantizedKVCache
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStatus, dequantize, quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from transformers import DynamicCache, LlamaConfig

from kvref.errors import ConfigError, PositionOutOfRange, ShapeMismatch
from kvref_adapters._shared.torch_arrays import E4M3FN, INT8, TorchRows, bytes_as_fp8, fp8_as_bytes
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.oracle.formats import PLAIN_FORMATS

ARGS = {
    name: QuantizationArgs(num_bits=8, type=kind, symmetric=True, strategy="token", dynamic=True)
    for name, kind in ((INT8, "int"), (E4M3FN, "float"))
}


class CompressedTensors(TorchRows):
    name = "compressed-tensors"
    version = version("compressed-tensors")
    project = "compressed-tensors"
    formats = (INT8, E4M3FN)

    def quantize(self, rows: Any, format: str) -> tuple[Any, Any, None]:
        tokens, args = rows[None], ARGS[format]
        scale, zero = compute_dynamic_scales_and_zp(tokens, args, None)
        codes = quantize(tokens, scale, zero, args, dtype=args.pytorch_dtype())
        return fp8_as_bytes(codes[0]), scale[0, :, 0], None

    def dequantize(self, codes: Any, scale: Any, zero: None, width: int, format: str) -> Any:
        return dequantize(bytes_as_fp8(codes, format)[None], scale[None, :, None], args=ARGS[format])[0]


class CompressedTensorsGroups(TorchRows):
    """The library packs codes as offsets from the lowest code; the adapter returns them before packing, one byte each."""

    name = "compressed-tensors-groups"
    version = version("compressed-tensors")
    project = "compressed-tensors"
    formats = tuple(f"int{bits}_g{group}_{scale}" for bits in (8, 4) for group in (32, 64, 128) for scale in PLAIN_FORMATS)

    def quantize(self, rows: Any, format: str) -> tuple[Any, Any, None]:
        args = _grouped(format)
        try:
            scale, zero = compute_dynamic_scales_and_zp(rows, args, None)
        except RuntimeError as error:
            raise ConfigError(str(error)) if "unflatten" in str(error) else error from error
        return quantize(rows, scale, zero, args, dtype=torch.int8), scale, None

    def dequantize(self, codes: Any, scale: Any, zero: None, width: int, format: str) -> Any:
        return dequantize(codes, scale, args=_grouped(format))


@cache
def _grouped(format: str) -> QuantizationArgs:
    element, group, scale = format.split("_")
    return QuantizationArgs(
        num_bits=int(element[3:]), type="int", symmetric=True, strategy="group", group_size=int(group[1:]),
        scale_dtype=getattr(torch, scale),
    )  # fmt: skip


class CompressedTensorsKV(TorchRows):
    """Layer lengths are the library's; it has no maximum length."""

    name = "compressed-tensors-kv"
    version = version("compressed-tensors")
    project = "compressed-tensors"
    formats = (E4M3FN,)
    limits: ClassVar[Mapping[str, Any]] = {"format": E4M3FN}
    rows = None  # type: ignore[assignment]

    def quantized(self, **config: Any) -> "HookedKVCache":
        return HookedKVCache(**config)


class HookedAttention(torch.nn.Module):  # type: ignore[misc]
    """The attributes of an attention layer that the hook reads."""

    def __init__(self, args: QuantizationArgs) -> None:
        super().__init__()
        self.quantization_scheme = QuantizationScheme(targets=["Attention"], input_activations=args)
        self.quantization_status = QuantizationStatus.FROZEN


class HookedKVCache:
    def __init__(self, *, num_layers: int, capacity: int, num_kv_heads: int, head_dim: int, format: str) -> None:
        for size in (num_layers, capacity, num_kv_heads, head_dim):
            if type(size) is not int or size < 1:
                raise NotOffered("validation of sizes, which the library does not take as arguments")
        if format not in ARGS:
            raise NotOffered(f"format {format}")
        self._longest, self._none = capacity, torch.zeros(0, num_kv_heads, head_dim)
        self._layers = [HookedAttention(ARGS[format]) for _ in range(num_layers)]
        self._hooks = [QuantizedKVCache(LlamaConfig(), layer) for layer in self._layers]
        self._cache = DynamicCache()

    def append(self, layer: int, keys: Any, values: Any) -> None:
        if not 0 <= layer < len(self._hooks):
            raise NotOffered("validation of the layer number")
        if keys.ndim == 3 and self.length(layer) + keys.shape[0] > self._longest:
            raise NotOffered("a maximum length")
        hook = self._hooks[layer]
        hook.add_past_key_values(self._cache)
        try:
            hook.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], layer)
        except (RuntimeError, IndexError, ValueError) as error:
            raise ShapeMismatch(str(error)) from error

    def length(self, layer: int) -> int:
        if not 0 <= layer < len(self._hooks):
            raise NotOffered("validation of the layer number")
        return int(self._cache.get_seq_length(layer))

    def read_tokens(self, layer: int, positions: Sequence[int]) -> tuple[Any, Any]:
        length = self.length(layer)
        if not all(0 <= position < length for position in positions):
            raise PositionOutOfRange(f"position: expected one in [0, {length}), got {list(positions)}")
        if not positions:
            return self._none, self._none
        held = self._cache.layers[layer]
        keys, values = (part[0].transpose(0, 1)[list(positions)] for part in (held.keys, held.values))
        return keys, values

    def clear(self) -> None:
        self._cache.reset()
