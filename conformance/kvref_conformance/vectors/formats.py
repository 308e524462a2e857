"""Test vectors of the formats as tensors: input rows, codes, scales and values. They can be used without replaying traces."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from safetensors.numpy import load, save

import kvref
from kvref.formats import get_format
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.adversarial import adversarial_rows
from kvref_conformance.oracle.formats import (
    FORMATS_IN_GROUPS,
    GGML_FORMATS,
    MX_FORMATS,
    NVFP4_FORMATS,
    ROTATED_FORMATS,
    inner_of,
    per_row,
    small_floats,
)
from kvref_conformance.testlib.assertions import assert_same
from kvref_conformance.traces.portability import require_float32

WIDTHS = (1, 5, 64)
WIDE_WIDTHS = (128, 256)  # widths for formats with groups
# A few of the formats of FMT-GROUP, which cover each property in which these formats differ.
SAMPLE_GROUP_FORMATS = (
    "int8_g32_bfloat16", "int4_g64_float16", "int2_g128_float32", "uint8_g128_float16", "uint4_g32_float32", "uint2_g64_bfloat16",
)  # fmt: skip
FP8_FORMATS = ("float8_e4m3fn", "float8_e5m2")
SIXTEEN_BIT_FORMATS = ("float16", "bfloat16")
CLAUSES = {
    "int8": "FMT-INT8-*", "q8": "FMT-AFF-*", "q4": "FMT-AFF-*", "float8_e4m3fn": "FMT-FP8-*", "float8_e5m2": "FMT-FP8-*",
    "float16": "FMT-CAST-01", "bfloat16": "FMT-CAST-01",
    **dict.fromkeys(GGML_FORMATS, "FMT-GGML-*"), **dict.fromkeys((*MX_FORMATS, *NVFP4_FORMATS), "FMT-MX-*"),
    **dict.fromkeys(SAMPLE_GROUP_FORMATS, "FMT-GROUP-*"), **dict.fromkeys(ROTATED_FORMATS, "FMT-ROT-*"),
}  # fmt: skip

Tensors = dict[str, NDArray]


def format_file(name: str) -> bytes:
    """A format as a safetensors file: rows from the reference, compared with the oracle, and single values from the oracle."""
    tensors = _row_tensors(name) if name not in SIXTEEN_BIT_FORMATS else {}
    if name in (*FP8_FORMATS, *SIXTEEN_BIT_FORMATS):
        tensors |= _element_tensors(name)
    about = {"format": name, "clauses": CLAUSES[name], "spec": kvref.__version__}
    file: bytes = save(tensors, metadata={"kvref": json.dumps(about)})
    return file


def _row_tensors(name: str) -> Tensors:
    """The tensors rows_W.input float32 [n, W], .codes, .scale and .zero (if any) [n] or [n, groups], .values float32 [n, W]."""
    tensors: Tensors = {}
    rng, format = np.random.default_rng(0), get_format(name)
    inner = inner_of(name)  # the format in which rotated rows are stored
    for width in WIDE_WIDTHS if inner in FORMATS_IN_GROUPS else WIDTHS:
        x = adversarial_rows(rng, width, name)
        stored = kvref.reference.quantize(x, format)
        part = {"input": x, **stored._asdict(), "values": kvref.reference.dequantize(stored, width, format)}
        want = per_row.store(x, name)
        assert np.array_equal(part["values"], want.values) and np.array_equal(part["codes"], per_row.packed(want, inner)), name
        assert part["scale"] is None or np.array_equal(per_row.scale_worth(part["scale"], inner), want.scale), name
        tensors |= {f"rows_{width}.{key}": np.ascontiguousarray(tensor) for key, tensor in part.items() if tensor is not None}
    return tensors


def _element_tensors(name: str) -> Tensors:
    """The tensors decode.codes and .values (all codes, only FP8), and encode.values float32 and .codes (ties, random numbers)."""
    near, rng = small_floats.ties_and_neighbours(name), np.random.default_rng(0)
    values = np.concatenate([near[:: max(1, len(near) // 4000)], rng.normal(size=1000).astype(np.float32), [0.0, -0.0, np.inf]])
    values = values.astype(np.float32)
    tensors = {"encode.values": values, "encode.codes": small_floats.encode(values, name)}
    if name in FP8_FORMATS:
        tensors |= {"decode.codes": np.arange(256), "decode.values": small_floats.decoded(name)}
    dtype = np.uint8 if name in FP8_FORMATS else np.uint16
    return {key: tensor.astype(dtype) if key.endswith("codes") else tensor for key, tensor in tensors.items()}


def check_format_file(subject: Subject, name: str, file: bytes) -> None:
    """Compare an implementation with a file, bit for bit. Raises ClauseViolation at the first tensor that differs; NotOffered.

    For level tolerant only values that it reads are compared, not the codes that it makes.
    """
    subject.formats(name)
    require_float32(subject)
    if name in ROTATED_FORMATS and subject.level != "exact":
        raise NotOffered("level exact")  # sums in another order give other values
    held = False
    for what, got, want in _comparisons(subject, name, load(file)):
        held = True
        assert_same(got, want, what)
    if not held:
        raise NotOffered(f"elements or rows of {name}")


def _comparisons(subject: Subject, name: str, tensors: Tensors) -> Iterator[tuple[str, Any, NDArray]]:
    if hasattr(subject.implementation, "rows"):
        family = subject.new("rows")
        for width in sorted(
            int(key[5:].partition(".")[0]) for key in tensors if key.startswith("rows_") and key.endswith(".input")
        ):
            part = {key.partition(".")[2]: tensor for key, tensor in tensors.items() if key.startswith(f"rows_{width}.")}
            codes, scale, zero = part["codes"], part.get("scale"), part.get("zero")
            yield f"rows_{width}.values", family.dequantize(codes, scale, zero, width, name), part["values"]
            if subject.level == "exact":
                for key, got in zip(("codes", "scale", "zero"), family.quantize(part["input"], name), strict=True):
                    if key == "codes":
                        yield f"rows_{width}.codes", got, part[key]
                    elif key in part:  # scales may be numbers, or the bits of a 16-bit float
                        mine, right = (per_row.scale_worth(each, inner_of(name)) for each in (got, part[key]))
                        yield f"rows_{width}.{key}", mine, right
    if hasattr(subject.implementation, "elements") and "encode.codes" in tensors:
        family = subject.new("elements")
        codes, values = tensors["encode.codes"], tensors["encode.values"]
        yield "encode", family.decode(family.encode(values, name), name), small_floats.decoded(name)[codes]
        if "decode.codes" in tensors:
            yield "encode.codes", family.encode(values, name), codes
            yield "decode.values", family.decode(tensors["decode.codes"], name), tensors["decode.values"]
