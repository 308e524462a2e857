"""Alternatives to kvref that are installed: plain NumPy and PyTorch, ml_dtypes, other quantizers, transformers, mlx-lm."""

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from kvref_bench.comparison import Contender
from kvref_conformance.implementations import load_implementation

BLOCK_SIZE = 16
QUANTIZERS = {  # row quantizers: name in the judge -> the package that provides it
    "torchao": "torchao",
    "torchao-groups": "torchao",
    "torchao-mx": "torchao",
    "optimum-quanto": "optimum.quanto",
    "optimum-quanto-groups": "optimum.quanto",
    "compressed-tensors": "compressed_tensors",
    "compressed-tensors-groups": "compressed_tensors",
    "hqq-nearest": "hqq",
    "mlx-quantize": "mlx_lm",
    "gguf": "gguf",
    "llama.cpp-rows": "xllamacpp",
}


def are_installed(*packages: str) -> bool:
    try:
        return all(find_spec(package) for package in packages)
    except ModuleNotFoundError:  # raised if the parent package of a dotted name is missing
        return False


@contextmanager
def quiet_import() -> Iterator[None]:
    """Suppress the messages of a library during its import."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


def kernel_contenders(title: str, rows: Any, how: Any) -> list[Contender]:
    """Return the third-party entries of a kernel's contest, on NumPy's `rows`."""
    found = list(_plain_contenders(title, rows, how))
    if title == "quantize int8":
        found += _int8_contenders(rows)
    if title.startswith(("quantize", "dequantize")):
        found += _quantizer_contenders(title, rows, how.name)
    if title.startswith(("encode", "decode")):
        found += _float8_contenders(title, rows, how)
    return found


def _plain_contenders(title: str, rows: Any, slots: Any) -> Iterator[Contender]:
    out = np.ones_like(rows)

    def assigned() -> None:
        out[slots] = rows

    def one_by_one() -> None:
        for to, start in enumerate(slots[::BLOCK_SIZE]):
            out[to * BLOCK_SIZE : (to + 1) * BLOCK_SIZE] = rows[start : start + BLOCK_SIZE]

    if title.startswith("gather"):
        yield Contender("memcpy, a block at a time", one_by_one)
        yield Contender("numpy: store[slots]", lambda: rows[slots])
        if are_installed("torch"):
            import torch

            store, index = torch.from_numpy(rows), torch.from_numpy(slots)
            yield Contender("torch: store[slots]", lambda: store[index])
    if title.startswith("copy"):
        store, half = rows.copy().reshape(-1, BLOCK_SIZE, *rows.shape[1:]), len(slots) // 2
        yield Contender("numpy: blocks[to] = blocks[of]", lambda: store.__setitem__(slots[half:], store[slots[:half]]))
    if title.startswith("scatter"):
        yield Contender("numpy: store[slots] = rows", assigned)


def _int8_contenders(rows: Any) -> Iterator[Contender]:
    def in_numpy() -> object:
        scale = np.maximum(np.abs(rows).max(axis=-1, keepdims=True) / np.float32(127), np.float32(2**-23))
        quotient = rows / scale
        return np.trunc(quotient + np.copysign(np.float32(0.49999997), quotient)).astype(np.int8), scale

    yield Contender("the same, written in numpy", in_numpy)
    if not are_installed("torch"):
        return
    import torch

    tensor = torch.from_numpy(rows)

    def in_torch() -> object:
        scale = (tensor.abs().amax(dim=-1, keepdim=True) / 127).clamp_min(2**-23)
        quotient = tensor / scale
        return torch.trunc(quotient + torch.copysign(torch.full_like(quotient, 0.49999997), quotient)).to(torch.int8), scale

    yield Contender("the same, in eager torch", in_torch)


def _quantizer_contenders(title: str, rows: Any, format: str) -> Iterator[Contender]:
    """Return each quantizer through the adapter that the judge uses."""
    for name, package in QUANTIZERS.items():
        if not are_installed(package):
            continue
        with quiet_import():
            quantizer: Any = load_implementation(name)
            if format not in quantizer.formats:
                continue
            given = quantizer.asarray(rows)
            stored = quantizer.quantize(given, format)
        if title.startswith("quantize"):
            yield Contender(name, partial(quantizer.quantize, given, format))
        else:
            yield Contender(name, partial(_read_back, quantizer, stored, rows.shape[-1], format))


def _read_back(quantizer: Any, stored: Any, width: int, format: str) -> None:
    """Dequantize and convert to NumPy, for MLX computes nothing until the result is read."""
    quantizer.to_numpy(quantizer.dequantize(*stored, width, format))


def _float8_contenders(title: str, values: Any, name: str) -> Iterator[Contender]:
    if are_installed("ml_dtypes"):
        import ml_dtypes

        dtype = getattr(ml_dtypes, name)
        yield Contender(
            "ml_dtypes", _cast_function(values.astype(dtype), np.float32) if "decode" in title else _cast_function(values, dtype)
        )


def _cast_function(values: Any, dtype: Any) -> Callable[[], object]:
    out = np.ones(values.shape, dtype)
    return lambda: np.copyto(out, values, casting="unsafe")


def transformers_caches(context: int, token: Any, room: int) -> Iterator[Contender]:
    """Appending `token` [batch, heads, 1, dim] at a context, in transformers' caches."""
    if not are_installed("torch", "transformers"):
        return
    import torch

    with quiet_import():
        from transformers import DynamicCache, LlamaConfig, QuantizedCache, StaticCache

    one = torch.from_numpy(token)
    filled = torch.ones((*one.shape[:2], context, one.shape[3]))
    config = LlamaConfig(num_hidden_layers=1)
    dynamic = DynamicCache()
    dynamic.update(filled, filled, 0)
    yield Contender("transformers DynamicCache", lambda: dynamic.update(one, one, 0))
    static = StaticCache(config, max_cache_len=context + room)
    static.update(filled, filled, 0)
    count = [0]

    def step() -> None:
        count[0] += 1
        if count[0] % room == 0:  # full: begin again
            static.reset()
            static.update(filled, filled, 0)
        static.update(one, one, 0)

    yield Contender("transformers StaticCache", step)
    if are_installed("optimum.quanto"):
        quantized = QuantizedCache("quanto", config, nbits=4, residual_length=128)
        quantized.update(filled, filled, 0)
        yield Contender("transformers QuantizedCache, 4 bits", lambda: quantized.update(one, one, 0))


def transformers_prefill(tokens: Any) -> Iterator[Contender]:
    if not are_installed("torch", "transformers"):
        return
    import torch
    from transformers import DynamicCache

    many = torch.from_numpy(tokens)
    yield Contender("transformers DynamicCache", lambda: DynamicCache().update(many, many, 0))


def transformers_fork(tokens: int, heads: int, dim: int) -> Iterator[Contender]:
    """Copy a prompt's cache to continue from it twice, as the documentation of transformers does."""
    if not are_installed("torch", "transformers"):
        return
    import torch
    from transformers import DynamicCache

    cache, rows = DynamicCache(), torch.ones((1, heads, tokens, dim))
    cache.update(rows, rows, 0)
    yield Contender("transformers: copy.deepcopy(cache)", lambda: copy.deepcopy(cache))


def window_contenders(window: int, position: int, heads: int, dim: int, *, attends: bool) -> Iterator[Contender]:
    """Store one more token in a full window and, if `attends`, attend over it with the attention of torch or MLX."""
    if are_installed("torch"):
        yield from _torch_windows(window, position, (1, heads, 1, dim), attends)
    if are_installed("mlx", "mlx_lm"):
        yield from _mlx_window(window, position, (1, heads, 1, dim), attends)


def _torch_windows(window: int, position: int, shape: tuple[int, ...], attends: bool) -> Iterator[Contender]:
    import torch

    one = torch.ones(shape)
    ring, turn = torch.ones((2, shape[0], shape[1], window, shape[3])), [0]

    def assigned(keys: Any, values: Any) -> tuple[Any, Any]:
        ring[0, :, :, turn[0]], ring[1, :, :, turn[0]] = keys[:, :, 0], values[:, :, 0]
        turn[0] = (turn[0] + 1) % window
        return ring[0], ring[1]

    ways: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {"torch: two slices of a ring assigned": assigned}
    if are_installed("transformers"):
        with quiet_import():
            from transformers.cache_utils import DynamicSlidingWindowLayer, StaticSlidingWindowLayer

        for layer in DynamicSlidingWindowLayer(window), StaticSlidingWindowLayer(position, window):
            filled = torch.ones((*shape[:2], position, shape[3]))
            layer.update(filled, filled)
            ways[f"transformers {type(layer).__name__}"] = layer.update

    def step(store: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        torch.nn.functional.scaled_dot_product_attention(one, *store(one, one))

    for name, store in ways.items():
        yield Contender(name, partial(step, store) if attends else partial(store, one, one))


def _mlx_window(window: int, position: int, shape: tuple[int, ...], attends: bool) -> Iterator[Contender]:
    import mlx.core as mx
    from mlx_lm.models.cache import RotatingKVCache

    cache, one = RotatingKVCache(max_size=window), mx.ones(shape)
    filled = mx.ones((*shape[:2], position, shape[3]))
    cache.update_and_fetch(filled, filled)

    def step() -> None:
        keys, values = cache.update_and_fetch(one, one)
        if attends:
            keys = mx.fast.scaled_dot_product_attention(one, keys, values, scale=shape[3] ** -0.5)
        mx.eval(keys, values)  # MLX computes nothing before eval

    yield Contender("mlx-lm RotatingKVCache", step)
