"""Adapters of tinygrad's casts, and of a cache as its language models keep one, on the device PYTHON, which needs no compiler.

That device interprets kernels in Python, so the generated graph is judged, not a device's compiled code. `tinygrad-cache` is one
buffer for keys and values, written by `assign` to a slice that begins at a bound Variable, and read by a slice, as in
`tinygrad.llm`. The caller, here the adapter, counts the tokens, so truncation is not offered.
"""

import os
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, ClassVar

os.environ.setdefault("DEV", "PYTHON")  # set before the import, which reads it

import numpy as np
from tinygrad import Tensor, Variable, dtypes

from kvref.errors import DtypeMismatch, ShapeMismatch
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import Level

DTYPES = {
    "float16": (dtypes.float16, dtypes.uint16),
    "bfloat16": (dtypes.bfloat16, dtypes.uint16),
    "float8_e4m3fn": (dtypes.fp8e4m3, dtypes.uint8),
    "float8_e5m2": (dtypes.fp8e5m2, dtypes.uint8),
}


class _Tinygrad:
    version = version("tinygrad")
    language = "python"
    project = "tinygrad"
    level: Level = "exact"

    def asarray(self, values: Any) -> Any:
        return Tensor(np.ascontiguousarray(values))

    def to_numpy(self, array: Any) -> Any:
        return array.numpy()


class TinygradCasts(_Tinygrad):
    name = "tinygrad-casts"
    formats = tuple(DTYPES)

    def elements(self) -> "TinygradCasts":
        return self

    def encode(self, values: Any, format: str) -> Any:
        dtype, codes = DTYPES[format]
        return values.cast(dtype).bitcast(codes).realize()

    def decode(self, codes: Any, format: str) -> Any:
        return codes.bitcast(DTYPES[format][0]).cast(dtypes.float32).realize()


class TinygradCache(_Tinygrad):
    name = "tinygrad-cache"
    formats = ("float32",)  # assigned values must have the buffer's dtype
    # Sizes are not limited; these are small enough to be interpreted in Python.
    limits: ClassVar[dict[str, Any]] = {
        "contiguous": {
            "batch_size": {"most": 2}, "num_kv_heads": {"most": 2}, "head_dim": {"most": 4}, "max_seq_len": {"most": 16},
        },
    }  # fmt: skip

    def contiguous(self, **config: Any) -> "TinygradLayer":
        return TinygradLayer(config)


class TinygradLayer:
    def __init__(self, config: dict[str, Any]) -> None:
        for name, value in config.items():
            least = 0 if name == "initial_capacity" else 1
            good = value == "float32" if name == "dtype" else type(value) is int and value >= least
            if not good:
                raise NotOffered(f"validation of {name}, which the library does not take as an argument")
        shape = 2, config["batch_size"], config["num_kv_heads"], config["max_seq_len"], config["head_dim"]
        self._both = Tensor.zeros(*shape).contiguous().realize()
        self.seq_len = 0

    def append(self, keys: Any, values: Any) -> None:
        try:
            both = Tensor.stack(keys, values)
        except (ValueError, RuntimeError, AssertionError) as error:
            raise ShapeMismatch(str(error)) from error
        self.append_fused(both)

    def append_fused(self, key_values: Any) -> None:
        longest = int(self._both.shape[3])
        count = int(key_values.shape[3]) if key_values.ndim == 5 else 0
        if self.seq_len + count > longest:
            raise NotOffered("a maximum length")
        start = Variable("start_pos", 0, longest - 1).bind(self.seq_len) if self.seq_len < longest else longest
        try:
            self._both[:, :, :, start : start + count].assign(key_values).realize()
        except (ValueError, RuntimeError, AssertionError) as error:
            raise (DtypeMismatch if "dtype" in str(error) else ShapeMismatch)(str(error)) from error
        self.seq_len += count

    def read(self) -> tuple[Any, Any]:
        return self._both[0, :, :, : self.seq_len], self._both[1, :, :, : self.seq_len]

    def raw(self) -> tuple[Any, Any]:
        return self._both[0], self._both[1]

    def reorder(self, rows: Sequence[int]) -> None:
        if not len(rows) or not all(0 <= row < self._both.shape[1] for row in rows):
            raise NotOffered("rejecting invalid rows, or none: a gather does not check indices")
        self._both = self._both[:, Tensor(list(rows))].contiguous().realize()
