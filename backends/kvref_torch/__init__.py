"""A backend in PyTorch, on any of its devices: in place, bit-identical to the reference.

Each format is a function over rows or groups [n, width] that writes codes and scales to arrays of the caller. On a CPU it is
applied to chunks of some ten thousand numbers, so that intermediate results stay in the processor's cache; on other devices to
all rows at once. With `compile=True` torch.compile fuses each function into one loop.

A tensor is never divided by a Python number, because on CUDA this multiplies by the reciprocal. Native float8 casts are used
within the range of the type only: outside, they differ between versions of PyTorch.

Slots are checked on the host (KERN-03). If they are integers on the host, as the caches pass them, no operation synchronizes with
the device, with two exceptions: formats with a scale, which must reject NaN before anything is written (LAW-14), and attention,
in which a number that is not finite must not affect queries that do not see it (ATTN-07).
"""

from collections.abc import Callable

import array_api_compat.torch as xp
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvref.array import Array, Namespace, Shape
from kvref.backend import Slots, blocks_to_copy, check_new, host_slots, last_writes, reference, slots_to_gather
from kvref.errors import BackendNotFound, NonFinite
from kvref.formats import Format, Quantized, SmallFloat
from kvref.formats.base import stored_as, widen
from kvref.formats.ggml import GGML, IQ4NL
from kvref.formats.group_scales import GroupFormat
from kvref.formats.hadamard import HadamardFormat
from kvref.formats.microscaling import MX, NVFP4
from kvref.formats.row_scales import SymmetricRow
from kvref.formats.static_scales import StaticFloat8
from kvref.formats.token_scales import AffineRow
from kvref.hadamard_kernels import dequantize_rotated, quantize_rotated
from kvref_torch.ggml import GGML_KERNELS, dequantize_ggml, quantize_ggml
from kvref_torch.groups import GROUP_KERNELS, dequantize_groups, dequantize_microscaled, quantize_groups, quantize_microscaled
from kvref_torch.packing import PACKING_KERNELS, Kernels
from kvref_torch.rows import (
    NATIVE,
    ROW_KERNELS,
    SMALL,
    dequantize_affine,
    dequantize_static,
    dequantize_symmetric,
    from_float_by_table,
    from_small,
    quantize_affine,
    quantize_static,
    quantize_symmetric,
)

BLOCK = 2**16  # numbers per chunk on a CPU: 256 KiB of float32
# Numbers per chunk of compiled kernels. They have fewer intermediate arrays, and calling one takes as long as processing tens of
# thousands of numbers. Quantizing reads its input once or twice; dequantizing also writes and reads full-size arrays.
COMPILED_ONCE, COMPILED_OFTEN = 2**22, 2**20
MOST_COMPILED = 64  # compiled versions per kernel: formats times head sizes, each for one row and for many
# Reducing a group of 32 numbers reduces within one vector: vectors of half the width of AVX-512 take half the time.
REDUCTIONS = ("largest", "extremes")
# Kernels that move bits within bytes. If Inductor writes no vector code, the C++ compiler vectorizes the loops itself, and they
# take a third to a half of the time of Inductor's vector code, which reads bytes through the stack.
PLAIN = ("pack", "unpack", "pack_halves", "from_table", "from_halves")
# Kernels that convert bytes to floats and multiply them: not compiled, because PyTorch's own copy is seven times as fast.
COPIED = ("from_int8", "from_affine", "from_float", "from_whole")

# By class of format: the functions that quantize and dequantize [n, width], where `width` numbers share a scale.
KERNELS: dict[type, tuple[Callable[..., Array], Callable[..., None]]] = {
    SymmetricRow: (quantize_symmetric, dequantize_symmetric),
    AffineRow: (quantize_affine, dequantize_affine),
    StaticFloat8: (quantize_static, dequantize_static),
    GroupFormat: (quantize_groups, dequantize_groups),
    MX: (quantize_microscaled, dequantize_microscaled),
    NVFP4: (quantize_microscaled, dequantize_microscaled),
    GGML: (quantize_ggml, dequantize_ggml),
    IQ4NL: (quantize_ggml, dequantize_ggml),
}


class TorchBackend:
    """The kernels of `kvref.Backend` in PyTorch."""

    xp: Namespace = xp

    def __init__(self, device: str = "cpu", compile: bool = False) -> None:
        """device: what torch.device accepts. compile: compile quantize and dequantize, which takes some seconds per format.

        Raises BackendNotFound if the device is not available.
        """
        try:
            self._device = torch.zeros(0, device=device).device
        except (RuntimeError, AssertionError) as error:  # no such device, or not supported by this build of PyTorch
            said = (str(error).splitlines() or [""])[0]
            raise BackendNotFound(f"backend torch: expected an available device, got {device!r}: {said}") from None
        self.name = ("torch-compiled" if compile else "torch") + ("" if device == "cpu" else f":{device}")
        on_host = self._device.type == "cpu"
        self._once = (COMPILED_ONCE if compile else BLOCK) if on_host else None
        self._often = (COMPILED_OFTEN if compile else BLOCK) if on_host else None
        if compile:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_COMPILED)
        kernels = (*ROW_KERNELS, *GROUP_KERNELS, *GGML_KERNELS, *PACKING_KERNELS)
        self._kernels = Kernels({kernel.__name__: self._compiled(kernel) if compile else kernel for kernel in kernels})
        self._kernels.fused = compile
        if on_host and not compile:
            self._kernels["from_float"] = from_float_by_table

    def zeros(self, shape: Shape, dtype: str) -> Array:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=self._device)

    def asarray(self, values: Array, dtype: str | None = None) -> Array:
        if dtype is None and isinstance(values, torch.Tensor) and values.device == self._device:
            return values  # what comes at every step
        if isinstance(values, np.ndarray):
            if not values.flags.writeable or any(stride < 0 for stride in values.strides):
                values = values.copy()  # torch takes neither
            values = torch.from_numpy(values)
        return torch.as_tensor(values, dtype=dtype and getattr(torch, dtype), device=self._device)

    def to_numpy(self, array: Array) -> Array:
        return array.detach().cpu().numpy()

    def address(self, array: Array) -> int | None:
        return int(array.data_ptr())

    def update(self, buffer: Array, new: Array, position: int) -> Array:
        buffer.narrow(2, position, new.shape[2]).copy_(new)
        return buffer

    def scatter(self, store: Array, slots: Slots, new: Array) -> Array:
        numbers = host_slots(slots, store.shape[0], self.to_numpy)
        check_new(store, len(numbers), new)
        kept = np.flatnonzero(numbers >= 0) if self._device.type == "cpu" else last_writes(numbers)
        if len(kept) < len(numbers):
            numbers, new = numbers[kept], new[self._index(kept)]
        if self._device.type == "cpu":
            _bits(store)[numbers] = _bits(new)  # NumPy, a third faster than index_copy_
        else:
            store.index_copy_(0, self._index(numbers), new)
        return store

    def gather(self, store: Array, slots: Slots, out: Array | None = None) -> Array:
        numbers = slots_to_gather(slots, store.shape[0], self.to_numpy)
        return torch.index_select(store, 0, self._index(numbers), out=out)

    def copy(self, store: Array, sources: Slots, targets: Slots, block_size: int = 1) -> Array:
        read, written, shape = blocks_to_copy(store, sources, targets, block_size, self.to_numpy)
        last = last_writes(written)
        blocks = store[: shape[0] * block_size].view(shape)
        blocks.index_copy_(0, self._index(written[last]), blocks.index_select(0, self._index(read[last])))
        return store

    def quantize(self, rows: Array, format: Format, out: Quantized | None = None) -> Quantized:
        if rows.dtype != torch.float32:
            rows = widen(rows)
        if format.granularity == "element":
            if out is None:
                return Quantized(rows.to(getattr(torch, format.name)))
            return Quantized(out.codes.copy_(rows))
        rows = rows.detach()  # no gradient flows through codes
        if isinstance(format, HadamardFormat):
            return quantize_rotated(self, rows, format, out)
        kernel = KERNELS.get(type(format))
        if kernel is None or rows.ndim == 0 or rows.numel() == 0 or rows.shape[-1] % (format.group or 1):
            return reference.quantize(rows, format, out)
        if out is None:
            parts = stored_as(format, tuple(rows.shape), xp)
            out = Quantized(*(rows.new_empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in parts))
        width = format.group or rows.shape[-1]  # numbers per scale
        flat = [out.codes.view(-1, format.code_width(width)), *(part.view(-1, 1) for part in out[1:] if part is not None)]
        most = self._often if isinstance(format, IQ4NL) else self._once  # its sums need several arrays of the input's size
        pieces = _pieces(most, rows.reshape(-1, width), *flat)
        read_back = [kernel[0](self._kernels, format, *each) for each in pieces]
        if not _all_finite(*read_back):  # values of the largest codes: not finite if the row or its range is not
            raise NonFinite("rows: expected finite values whose dequantized values are finite, got other values")
        return out

    def dequantize(self, stored: Quantized, width: int, format: Format, out: Array | None = None) -> Array:
        codes = stored.codes
        if format.granularity == "element":
            return codes.to(torch.float32) if out is None else out.copy_(codes)
        if isinstance(format, HadamardFormat):
            return dequantize_rotated(self, stored, width, format, out)
        kernel = KERNELS.get(type(format))
        if kernel is None or codes.numel() == 0 or width % (format.group or 1):
            return reference.dequantize(stored, width, format, out)
        if out is None:
            out = codes.new_empty((*codes.shape[:-1], width), dtype=torch.float32)
        width = format.group or width
        scales = [part.detach().reshape(-1, 1) for part in stored[1:] if part is not None]
        scales = [part.view(torch.bfloat16) if part.dtype == torch.uint16 else part for part in scales]  # of other backends
        for each in _pieces(self._often, out.view(-1, width), codes.reshape(-1, format.code_width(width)), *scales):
            kernel[1](self._kernels, format, *each)
        return out

    def encode(self, values: Array, element: SmallFloat, out: Array | None = None) -> Array:
        values = widen(values)
        if out is None:
            out = values.new_empty(values.shape, dtype=getattr(torch, element.code_dtype))
        fused, saturates = self._kernels.fused and element.name in SMALL, element.infinity is None
        for x, part in _pieces(self._once, values.reshape(-1, 1), out.view(-1, 1)):
            if fused:
                limit = torch.full_like(x[:1, 0], element.max if saturates else 2.0 ** (1 + element.bias))
                self._kernels["encode_small"](x[:, 0], limit, part[:, 0].view(torch.int8), element.name)
                continue
            clipped = x.clamp(-element.max, element.max) if saturates else x  # beyond the range, casts differ by version
            part.copy_(clipped.to(NATIVE[element]).view(part.dtype))
            if saturates and not bool(torch.isfinite(x.sum())):  # cheaper than isinf of all
                part.masked_fill_(torch.isinf(x), element.nan)
        return out

    def decode(self, codes: Array, element: SmallFloat, out: Array | None = None) -> Array:
        if out is None:
            out = codes.new_empty(codes.shape, dtype=torch.float32)
        for y, part in _pieces(self._often, out.view(-1, 1), codes.reshape(-1, 1)):
            from_small(self._kernels, element, part, y)
        return out

    def attend(
        self, query: Array, keys: Array, values: Array, scale: float, mask: Array, logit_sink: Array | None = None
    ) -> Array:
        if not bool(mask.all()) and not _masks_hide(query, keys, values, scale):
            seen = mask.any(dim=0)
            keys, values, mask = keys[seen], values[seen], mask[:, seen]
            if not _masks_hide(query, keys, values, scale) and not bool(mask.all()):
                each = [
                    self.attend(query[i : i + 1], keys[sees], values[sees], scale, mask[i : i + 1, sees], logit_sink)
                    for i, sees in enumerate(mask)
                ]
                return torch.cat(each)
        out = query.new_zeros((*query.shape[:2], values.shape[2]))
        sees_some = mask.any(dim=1)  # a query that sees no token gets zeros (ATTN-08)
        if bool(sees_some.any()):
            group = query.shape[1] // keys.shape[1]
            k, v = (each.transpose(0, 1)[None] for each in (keys, values))  # [1, kv heads, tokens, D]
            # The query heads of a group are concatenated, [1, kv heads, group * queries, D]: no key is repeated.
            q = query.transpose(0, 1).reshape(1, keys.shape[1], group * len(mask), -1)
            shown = (mask | ~sees_some[:, None]).repeat(group, 1)
            if logit_sink is None:
                attended = scaled_dot_product_attention(q, k, v, attn_mask=shown, scale=scale)
                if not bool(attended.any(dim=3).all()):  # PyTorch also returns zeros if all scores are -inf (ATTN-03)
                    scores = torch.where(shown, scale * (q @ k.mT), -torch.inf)
                    attended[torch.isneginf(scores).all(dim=3)] = torch.nan
            else:  # scaled_dot_product_attention has no logit sink
                scores = torch.where(shown, scale * (q @ k.mT), -torch.inf)
                sink = logit_sink.repeat_interleave(len(mask)).reshape(*q.shape[:3], 1)
                weights = torch.cat([scores, sink], dim=3).softmax(dim=3)[..., :-1]
                attended = weights @ v
            attended = attended.reshape(query.shape[1], len(mask), -1).transpose(0, 1)
            out = torch.where(sees_some[:, None, None], attended, out)
        return out

    def _compiled(self, kernel: Callable[..., Array]) -> Callable[..., Array]:
        """A kernel compiled with the options that are fastest for it."""
        options = None
        if self._device.type == "cpu":
            if kernel.__name__ in COPIED:
                return kernel
            if kernel.__name__ in PLAIN:
                options = {"cpp.simdlen": 1}
            elif kernel.__name__ in REDUCTIONS and torch.backends.cpu.get_cpu_capability() == "AVX512":
                options = {"cpp.simdlen": 256}
        compiled: Callable[..., Array] = torch.compile(kernel, options=options)
        return compiled

    def _index(self, numbers: Array) -> Array:
        """Integers of the host as a tensor on the device, without synchronizing."""
        return torch.from_numpy(np.ascontiguousarray(numbers)).to(self._device, non_blocking=True)


def backend(device: str = "cpu", compile: bool = False) -> TorchBackend:
    """Return the backend: the entry point "torch". Raises BackendNotFound."""
    return TorchBackend(device, compile)


def compiled(device: str = "cpu") -> TorchBackend:
    """Return the backend with compiled kernels: the entry point "torch-compiled". Raises BackendNotFound."""
    return TorchBackend(device, compile=True)


def _pieces(most: int | None, *arrays: Array) -> list[tuple[Array, ...]]:
    """Divide arrays with the same first axis into chunks of at most `most` numbers of the first, [n, width]. None: one chunk."""
    if most is None:
        return [arrays]
    rows = max(1, most // max(1, arrays[0].shape[1]))
    return list(zip(*(each.split(rows) for each in arrays), strict=True))


def _bits(tensor: Array) -> Array:
    """A tensor as a NumPy array with the same memory; bfloat16, which NumPy lacks, as int16."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()


def _masks_hide(query: Array, keys: Array, values: Array, scale: float) -> bool:
    """Whether a mask can hide any of the tokens. PyTorch adds -inf to their scores: the sum is NaN if a score overflows."""
    numbers = query.detach(), keys.detach()
    largest = [float(torch.stack([-each.amin(), each.amax()]).amax()) if each.numel() else 0.0 for each in numbers]
    bound = query.shape[2] * largest[0] * largest[1] * max(1.0, abs(scale))  # of a score and its sums; NaN if any number is
    return bound <= torch.finfo(keys.dtype).max and _all_finite(values)


def _all_finite(*arrays: Array) -> bool:
    """Whether all numbers are finite. It checks the extremes, which are NaN if any number is: faster than isfinite of all."""
    ends = (torch.stack([array.amin(), array.amax()]) for array in arrays if array.numel())
    return all(bool(torch.isfinite(each).all()) for each in ends)
