"""Wrong quantized caches, KIVI caches and kernels for formats."""

from typing import Any

import numpy as np
import pytest

import kvref
import kvref.quantized
import kvref_numpy
from kvref import ChannelCache, ChannelConfig, Quantized, QuantizedCache, QuantizedConfig, get_format
from kvref.errors import NonFinite
from kvref.formats.row_scales import SymmetricRow
from kvref.formats.small_float import BFLOAT16
from kvref.validation import accept, accept_pair
from kvref_numpy import NumPyBackend
from wrong_designs.design import NUMPY, around, design, noise, observe, plain, rows


def quantized(**changes: Any) -> Any:
    """A quantized cache."""
    sizes = {"num_layers": 2, "capacity": 4, "num_kv_heads": 1, "head_dim": 2}
    return QuantizedCache(QuantizedConfig(**(sizes | changes)), NUMPY)


def _full_second_layer() -> Any:
    cache = quantized(capacity=1)
    cache.append(1, rows(1, dim=2), rows(1, dim=2))
    new = rows(3, 4, dim=2)
    return observe(cache.append_step, new, new), cache.length(0)


@design("quantized", "QUANT-01", _full_second_layer)
def append_step_appends_layer_by_layer(patch: pytest.MonkeyPatch) -> None:
    """If a later layer is full, the earlier layers already have the token."""

    @around(patch, QuantizedCache, "append_step")
    def append_step(original: Any, self: Any, keys: Any, values: Any) -> None:
        shape = (self.config.num_layers, self.config.num_kv_heads, self.config.head_dim)
        keys, values = accept_pair(keys, values, shape, self._backend)
        for layer in range(self.config.num_layers):
            self.append(layer, keys[layer : layer + 1], values[layer : layer + 1])


def _wide_row() -> Any:
    row = np.ones((1, 512), np.float32)
    row[0, 300] = 100
    return NUMPY.quantize(row, get_format("int8")).scale


@design("rows", "FMT-INT8-01", _wide_row)
def the_largest_magnitude_is_of_256_numbers(patch: pytest.MonkeyPatch) -> None:
    """The scale is that of the first 256 numbers of a row, as a kernel with 256 threads per row finds them."""

    @around(patch, NumPyBackend, "quantize")
    def quantize(original: Any, self: Any, given: Any, format: Any, out: Any = None) -> Any:
        if isinstance(format, SymmetricRow) and given.shape[-1] > 256 and given.size:
            largest = np.abs(given[..., :256]).max(axis=-1, keepdims=True)
            if np.isfinite(given).all():
                given = np.clip(given, -largest, largest)
        return original(self, given, format, out)


def _static_step() -> Any:
    cache = quantized(format="float8_e4m3fn_static", key_scale=1.0, value_scale=4.0)
    cache.append_step(rows(1, 1, dim=2), rows(1000, 1000, dim=2))
    return cache.read_token(0, 0)


@design("quantized", "FMT-STATIC-06", _static_step)
def append_step_uses_the_scale_of_keys_for_values(patch: pytest.MonkeyPatch) -> None:
    """`append_step` passes one scale for keys and values, and `append` two."""

    @around(patch, QuantizedCache, "append_step")
    def append_step(original: Any, self: Any, keys: Any, values: Any) -> None:
        store, own = self._store.values, self._store.values.format
        store.format = self._store.keys.format
        try:
            original(self, keys, values)
        finally:
            store.format = own


def _loaded_uneven() -> Any:
    cache, target = quantized(), quantized()
    cache.append(0, rows(1, 2, dim=2), rows(1, 2, dim=2))
    cache.append(1, rows(3, dim=2), rows(3, dim=2))
    target.load(cache.save())
    target.append(1, rows(5, dim=2), rows(5, dim=2))
    return [target.length(layer) for layer in (0, 1)], observe(target.read_tokens, 1, [1])


@design("quantized", "MOVE-01", _loaded_uneven)
def the_first_append_after_load_is_at_the_longest_layer(patch: pytest.MonkeyPatch) -> None:
    """After `load` every layer continues at the length of the longest: a shorter layer has a gap."""

    @around(patch, QuantizedCache, "receive")
    def receive(original: Any, self: Any, file: Any) -> None:
        original(self, file)
        self._loaded = True

    @around(patch, QuantizedCache, "append")
    def append(original: Any, self: Any, layer: int, *arguments: Any) -> None:
        if self.__dict__.pop("_loaded", False) and layer < len(self._lengths) and len(arguments[0]):
            self._lengths[layer] = min(max(self._lengths), self.config.capacity - len(arguments[0]))
        original(self, layer, *arguments)


def _large_but_finite() -> Any:
    return observe(NUMPY.quantize, np.full((1, 4), 3e38, np.float32), get_format("int8"))


@design("rows", "FMT-INT8-01", _large_but_finite)
def a_row_is_finite_if_its_sum_is(patch: pytest.MonkeyPatch) -> None:
    """The sum of a row shows whether it contains a NaN or an infinity, and overflows for large finite numbers."""

    @around(patch, NumPyBackend, "quantize")
    def quantize(original: Any, self: Any, given: Any, format: Any, out: Any = None) -> Any:
        if format.granularity != "element" and given.ndim:
            with np.errstate(over="ignore", invalid="ignore"):
                if not np.isfinite(given.astype(np.float32).sum(axis=-1)).all():
                    raise NonFinite("rows: expected finite values")
        return original(self, given, format, out)


def _mean_of_means() -> Any:
    given = noise(65, dim=4).reshape(65, 4)
    given[64] *= 100
    return kvref.mean_absolute_error(given, "int8", NUMPY)


@design("rows", "QUANT-09", _mean_of_means)
def the_mean_error_is_a_mean_of_chunk_means(patch: pytest.MonkeyPatch) -> None:
    """Means of 64 rows each are averaged, which is wrong if the last chunk is shorter."""

    @around(patch, kvref, "mean_absolute_error")
    def mean_absolute_error(original: Any, given: Any, format: Any, backend: Any = NUMPY) -> float:
        given = accept("rows", given, ("n", "width"), backend)
        parts = [original(given[start : start + 64], format, backend) for start in range(0, max(1, given.shape[0]), 64)]
        return float(np.mean(parts))


def _nan_with_low_bits() -> Any:
    row = np.array([0x7F800001], np.uint32).view(np.float32)
    return plain(NUMPY.encode(row, BFLOAT16))


@design("elements", "FMT-CAST-01", _nan_with_low_bits)
def a_nan_with_low_bits_becomes_infinite_in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """bfloat16 is the upper half of a float32: a NaN whose payload is in the lower half becomes an infinity."""

    @around(patch, kvref_numpy, "encode_bfloat16")
    def encode_bfloat16(original: Any, x: Any, out: Any, element: Any) -> None:
        original(x, out, element)
        bits = x.view(np.uint32)
        lost = ((bits & 0x7F800000) == 0x7F800000) & ((bits & 0x007F0000) == 0)
        out[lost] = (bits[lost] >> 16).astype(out.dtype)


def _one_more_row() -> Any:
    given = noise(3, dim=32).reshape(3, 32)
    given[1], given[2] = 0, 10 * given[2]
    stored = NUMPY.quantize(given, get_format("q4_0"))
    return plain(NUMPY.dequantize(stored, 32, get_format("q4_0")))


@design("rows", "FMT-GGML-02", _one_more_row)
def a_row_after_zeros_uses_the_last_scale(patch: pytest.MonkeyPatch) -> None:
    """A row of zeros does not set the scale, and the row after it keeps that of the row before: larger numbers are clamped."""

    @around(patch, NumPyBackend, "quantize")
    def quantize(original: Any, self: Any, given: Any, format: Any, out: Any = None) -> Any:
        if format.name.startswith(("q4_0", "q5_0")) and given.ndim == 2 and len(given) > 2:
            blank = ~given.any(axis=1)
            after = np.flatnonzero(blank[1:-1] & ~blank[:-2]) + 2
            given = given.copy()
            for row in after:
                given[row] = np.clip(given[row], -np.abs(given[row - 2]).max(), np.abs(given[row - 2]).max())
        return original(self, given, format, out)


def channels(**changes: Any) -> Any:
    """A KIVI cache."""
    sizes = {"num_kv_heads": 1, "head_dim": 32, "max_tokens": 640, "residual": 32, "format": "uint2_g32_float16"}
    return ChannelCache(ChannelConfig(**(sizes | changes)), NUMPY)


def _rolled_back() -> Any:
    cache, new = channels(rollback=8), noise(33, dim=32)
    cache.append(new, new)
    cache.truncate(30)
    return cache.read(range(30))[0]


@design("channels", "KIVI-08", _rolled_back)
def tokens_return_to_the_residual_from_their_codes(patch: pytest.MonkeyPatch) -> None:
    """A truncation that makes a key group incomplete restores its tokens by dequantizing them."""

    @around(patch, ChannelCache, "truncate")
    def truncate(original: Any, self: Any, length: int) -> None:
        old, self_length = self.quantized_keys, self.length
        new = self.config.quantized_keys(int(length)) if 0 <= int(length) <= self_length else old
        codes = self._read(new, old)[0] if new < old else None
        original(self, length)
        if codes is not None and self.length:
            positions = np.arange(new, old)
            kept = positions >= self._first
            self._full.keys.put(positions[kept] % self._ring, self._full.keys.quantized(codes[kept]))


def _unrounded() -> Any:
    cache, new = channels(dtype="bfloat16"), noise(64, dim=32)
    cache.append(new, new)
    return cache.read(range(32))[0]


@design("channels", "KIVI-03", _unrounded)
def a_prompt_is_quantized_from_unrounded_numbers(patch: pytest.MonkeyPatch) -> None:
    """Groups that are complete within one append are quantized from the caller's float32 numbers."""

    @around(patch, ChannelCache, "append")
    def append(original: Any, self: Any, new_keys: Any, new_values: Any) -> None:
        shape = ("n", self.config.num_kv_heads, self.config.head_dim)
        self._exact = accept_pair(new_keys, new_values, shape, self._backend)
        original(self, new_keys, new_values)

    @around(patch, ChannelCache, "_originals")
    def originals(original: Any, self: Any, which: int, start: int, stop: int, new: Any) -> Any:
        return original(self, which, start, stop, self._exact)


def _long_attend() -> Any:
    cache, new = channels(), noise(600, dim=32)
    cache.append(new, new)
    return cache.attend(noise(1, dim=32, seed=1))


@design("channels", "ATTN-10", _long_attend)
def a_tile_begins_at_its_group(patch: pytest.MonkeyPatch) -> None:
    """`attend` reads tiles; a tile that begins inside a key group gets the keys from the beginning of the group."""

    @around(patch, ChannelCache, "_read")
    def read(original: Any, self: Any, start: int, stop: int) -> Any:
        found, values = original(self, start, stop)
        inside, count = start % self.config.groups.group, min(self.quantized_keys, stop) - start
        if inside and count > 0:
            early = original(self, start - inside, stop)[0][:count]
            found = np.concatenate([early, found[count:]])
        return found, values


def _second_turn() -> Any:
    cache, new = channels(), noise(80, dim=32)
    cache.append(new[:20], new[:20])
    cache.append(new[20:], new[20:])
    return cache.read(range(64))[1]


@design("channels", "KIVI-04", _second_turn)
def values_leave_the_residual_in_the_next_call(patch: pytest.MonkeyPatch) -> None:
    """Values that an append both adds and pushes out of the residual are quantized from what the ring has then: other tokens."""

    @around(patch, ChannelCache, "_originals")
    def originals(original: Any, self: Any, which: int, start: int, stop: int, new: Any) -> Any:
        found = original(self, which, start, stop, new)
        if which and self.length and stop - self.length > 0 and start < self.length:
            found[self.length - start :] = found[self.length - start - 1 : self.length - start]
        return found


def _static_other_dtype() -> Any:
    stored = Quantized(np.array([[1, 2]], np.int8), np.array([2.0], np.float32))
    wide = np.zeros((1, 4), np.int8)
    wide[:, ::2] = stored.codes
    return NUMPY.dequantize(Quantized(wide[:, ::2], stored.scale), 2, get_format("int8"))


@design("rows", "LAW-15", _static_other_dtype)
def dequantize_ignores_strides(patch: pytest.MonkeyPatch) -> None:
    """Codes that are a view with a stride are read as if they were contiguous."""

    @around(patch, NumPyBackend, "dequantize")
    def dequantize(original: Any, self: Any, stored: Any, width: int, format: Any, out: Any = None) -> Any:
        codes = stored.codes
        if format.name == "int8" and codes.ndim == 2 and codes.size and 0 < codes.strides[-1] != codes.itemsize:
            stride = codes.strides[0]
            codes = np.lib.stride_tricks.as_strided(codes, strides=(stride, codes.itemsize))
        return original(self, stored._replace(codes=codes), width, format, out)
