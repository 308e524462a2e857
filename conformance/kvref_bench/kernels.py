"""Contests of kernels: each backend processes float32 rows into memory that is already allocated."""

from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import Any

import numpy as np

import kvref
from kvref.array import ITEM_BYTES, Array
from kvref.formats import element_format
from kvref.formats.base import stored_as
from kvref.formats.group_scales import GroupFormat
from kvref_bench import baselines
from kvref_bench.baselines import BLOCK_SIZE
from kvref_bench.comparison import HOST, Comparison, Contender, Machine

SHAPES = ((8, 128), (2, 64), (1, 576))  # kv heads and head_dim: Llama-like, small, a latent
MakeRun = Callable[[kvref.Backend, Array, Any], Callable[[], object]]  # (backend, rows, format) -> the function to time
ELEMENTS = ("float8_e4m3fn", "float8_e5m2")


def machine_of(backend: kvref.Backend) -> Machine:
    """Return the host, or the device of a backend."""
    if backend.name.startswith("torch") and ":" in backend.name:
        import torch

        return Machine(partial(_copy_function, backend), torch.accelerator.synchronize)
    if backend.name == "cupy":
        import cupy

        return Machine(partial(_copy_function, backend), cupy.cuda.Device().synchronize)
    return HOST


def _copy_function(backend: kvref.Backend, size: int) -> Callable[[], object]:
    source, target = backend.zeros((1, 1, size, 1), "uint8"), backend.zeros((1, 1, size, 1), "uint8")
    return lambda: backend.update(target, source, 0)


def kernel_contests(backends: list[kvref.Backend], megabytes: int, wanted: Callable[[str], bool]) -> Iterator[Comparison]:
    """Yield the wanted contests (by title, or title and shape) one at a time: each needs a few times its size in memory."""
    for heads, dim in SHAPES:
        tokens = megabytes * 2**20 // (4 * heads * dim) // BLOCK_SIZE * BLOCK_SIZE
        rng = np.random.default_rng(0)
        rows = rng.standard_normal((tokens, heads, dim), np.float32)
        shape = f"{heads} x {dim}"
        asked = partial(_is_wanted, wanted, shape)
        blocks = rng.permutation(tokens // BLOCK_SIZE)
        slots = (blocks[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)
        moves: dict[str, MakeRun] = {"gather 16-token blocks": _gather, "scatter 16-token blocks": _scatter}
        for title, make in moves.items():
            if asked(title):
                yield _contest(title, shape, 2 * rows.nbytes, rows, backends, make, slots)
        if asked(title := "copy 16-token blocks"):  # one half onto the other
            yield _contest(title, shape, rows.nbytes, rows, backends, _copy, blocks[: len(blocks) // 2 * 2])
        for name, format in kvref.FORMATS.items():
            one_of_many = isinstance(format, GroupFormat) and (format.group, format.scale.name) != (64, "float32")
            if name == "float32" or one_of_many or dim % (format.group or 1):
                continue
            width = heads * dim if format.granularity == "token" else dim
            each = rows.size // width
            parts = stored_as(format, (each, width), backends[0].xp)
            stored = sum(ITEM_BYTES[dtype] * prod(shape) for shape, dtype in parts)
            flat = rows.reshape(each, width)
            both: dict[str, MakeRun] = {f"quantize {name}": _quantize, f"dequantize {name}": _dequantize}
            for title, make in both.items():
                if asked(title):
                    yield _contest(title, shape, rows.nbytes + stored, flat, backends, make, format)
    for name in ELEMENTS:
        values = rng.standard_normal(megabytes * 2**18, np.float32)
        singly: dict[str, MakeRun] = {f"encode {name}": _encode, f"decode {name}": _decode}
        for title, make in singly.items():
            if _is_wanted(wanted, "values", title):
                yield _contest(title, "values", values.nbytes + values.size, values, backends, make, name)


def _is_wanted(wanted: Callable[[str], bool], shape: str, title: str) -> bool:
    return wanted(title) or wanted(f"{title} {shape}")


def _contest(title: str, shape: str, moved: int, rows: Any, backends: list[kvref.Backend], make: MakeRun, how: Any) -> Comparison:
    runs = [make(backend, backend.asarray(rows.copy()), how) for backend in backends]
    entries = [Contender(f"kvref {backend.name}", run, machine_of(backend)) for backend, run in zip(backends, runs, strict=True)]
    entries += baselines.kernel_contenders(title, rows, how)
    return Comparison(title, shape, moved, entries, data=rows.nbytes)


def _gather(backend: kvref.Backend, rows: Array, slots: Any) -> Callable[[], object]:
    out = _mapped_like(backend, rows)
    return lambda: backend.gather(rows, slots, out)


def _scatter(backend: kvref.Backend, rows: Array, slots: Any) -> Callable[[], object]:
    store = _mapped_like(backend, rows)
    return lambda: backend.scatter(store, slots, rows)


def _copy(backend: kvref.Backend, rows: Array, blocks: Any) -> Callable[[], object]:
    half = len(blocks) // 2
    return lambda: backend.copy(rows, blocks[:half], blocks[half:], BLOCK_SIZE)


def _quantize(backend: kvref.Backend, rows: Array, format: kvref.Format) -> Callable[[], object]:
    out = backend.quantize(rows, format)
    return lambda: backend.quantize(rows, format, out)


def _dequantize(backend: kvref.Backend, rows: Array, format: kvref.Format) -> Callable[[], object]:
    stored, out = backend.quantize(rows, format), _mapped_like(backend, rows)
    return lambda: backend.dequantize(stored, rows.shape[-1], format, out)


def _encode(backend: kvref.Backend, values: Array, name: str) -> Callable[[], object]:
    element = element_format(name)
    out = backend.encode(values, element)
    return lambda: backend.encode(values, element, out)


def _decode(backend: kvref.Backend, values: Array, name: str) -> Callable[[], object]:
    element = element_format(name)
    codes, out = backend.encode(values, element), _mapped_like(backend, values)
    return lambda: backend.decode(codes, element, out)


def _mapped_like(backend: kvref.Backend, rows: Array) -> Array:
    """Return memory of the same size that the system has already mapped."""
    out = backend.zeros(tuple(rows.shape), "float32")
    out[...] = 1.0
    return out
