"""The families without a state, whose every reply follows from the arguments: elements, rows, kernels, attention."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.oracle import elements, rows
from kvref_conformance.oracle.attention import U, attention
from kvref_conformance.oracle.expected import (
    CODED,
    Arrays,
    Expected,
    Refused,
    TakenOrRefused,
    Unjudged,
    Wrong,
    exactly,
    finite,
    float32,
    not_finite,
    refuse,
    wrong_arrays,
)  # fmt: skip
from kvref_conformance.oracle.model import Look, Model
from kvref_conformance.oracle.rows import Reads


class Function(Model):
    """What it cannot judge raises ValueError, which makes it unknown."""

    blamed: ClassVar = {}

    def looks(self) -> list[Look]:
        return []


class Elements(Function):
    family = "elements"

    def encode(self, values: NDArray, format: str) -> Expected:
        if wrong_arrays((values, (None,))):
            raise ValueError("values of another shape or dtype")
        x = float32(values)
        if format in CODED:  # codes of any type that decode takes
            return Arrays("FMT-CAST-01", parts=(exactly(elements.round_to(x, format)),), codes_of=format)
        codes = elements.encode(x, format)
        nan = np.isnan(elements.decoded(format)[codes])  # any of several codes
        return Arrays("FMT-FP8-02", parts=(exactly(codes),), unsure=nan if nan.any() else None)

    def decode(self, codes: NDArray, format: str) -> Expected:
        if format in CODED and codes.dtype.kind not in "iu":
            return Arrays("FMT-CAST-01", parts=(exactly(float32(codes)),))
        values = elements.decoded(format)[codes.astype(np.int64)]
        return Arrays("FMT-CAST-01" if format in CODED else "FMT-FP8-01", parts=(exactly(values),))


class Rows(Function):
    family = "rows"

    def quantize(self, rows: NDArray, format: str) -> Expected:
        if np.ndim(rows) != 2:
            raise ValueError("rows of another shape")
        if wrong := wrong_arrays((rows, np.shape(rows))):
            return refuse(wrong + not_finite(rows), lambda: None)
        x = float32(rows)
        if not finite(x):
            return TakenOrRefused("LAW-14")
        return _quantized(x, format)

    def dequantize(self, codes: NDArray, scale: NDArray, zero: NDArray | None, width: int, format: str) -> Expected:
        plain = rows.unpack4(codes, width) if format == "q4" else np.asarray(codes).astype(np.int64)
        decoded = plain if format == "int8" or format in rows.AFFINE else elements.decoded(format)[plain]
        values = rows.fl(decoded * np.asarray(scale, np.float64)[:, None])
        if zero is not None:
            values = rows.fl(values + np.asarray(zero, np.float64)[:, None])
        clause = "FMT-AFF-04" if format in rows.AFFINE else "FMT-INT8-03" if format == "int8" else "FMT-FP8-08"
        return Arrays(clause, parts=(exactly(values.astype(np.float32)),))


@dataclass(frozen=True)
class QuantizedRows(Arrays):
    """Codes, scale and zero, where the zero of a symmetric format is nothing to be judged."""

    def look(self, ok: Any, op: str, level: Any) -> None:
        super().look(ok[: len(self.parts)], op, level)

    def wire(self) -> dict[str, Any]:
        said = super().wire()
        if len(self.parts) == 2:
            said = {name: [*parts, None] for name, parts in said.items()}
        return said


def _quantized(x: NDArray, format: str) -> Expected:
    want = rows.store(x, format)
    if not np.isfinite(want.scale).all():
        return Refused("FMT-AFF-01", kinds=("NonFinite",))
    if not finite(want.values):  # with a scale an ulp smaller, at level tolerant, they may be
        return TakenOrRefused("FMT-LEVEL-05")
    codes, other = want.codes, rows.admissible_too(x, format)
    if format == "q4":
        codes, other = (_packed(part) for part in (codes, other))
    parts = [Reads(codes, other.astype(np.float64)), Reads(want.scale, np.spacing(want.scale).astype(np.float64))]
    if format in rows.AFFINE:
        parts.append(exactly(want.zero))
    clause = {"int8": "FMT-INT8-02", "q8": "FMT-AFF-02", "q4": "FMT-AFF-02"}.get(format, "FMT-FP8-08")
    return QuantizedRows(clause, names=("codes", "scale", "zero")[: len(parts)], parts=tuple(parts))


def _packed(codes: NDArray) -> NDArray:
    padded = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    both: NDArray = padded[:, 0::2] + 16 * padded[:, 1::2]
    return both


class Kernels(Function):
    family = "kernels"

    def scatter(self, store: NDArray, slots: NDArray, new: NDArray) -> Expected:
        slots = np.asarray(slots)
        wrong = _wrong_slots(slots, -math.inf, len(store))
        if new.shape != (*slots.shape[:1], *store.shape[1:]):
            wrong.append(("ShapeMismatch", "KERN-03"))
        if new.dtype != store.dtype:
            wrong.append(("DtypeMismatch", "KERN-03"))
        if wrong:
            return self.refuse(wrong)
        want, unsure = store.copy(), np.zeros(store.shape, bool)
        for slot, token in zip(slots.tolist(), new, strict=True):
            if slot >= 0:
                want[slot] = token
                unsure[slot] = (slots == slot).sum() > 1  # one of the tokens, whole (KERN-07)
        return Arrays("KERN-01", parts=(exactly(want),), bits=True, unsure=unsure if unsure.any() else None)

    def gather(self, store: NDArray, slots: NDArray) -> Expected:
        slots = np.asarray(slots)
        if wrong := _wrong_slots(slots, 0, len(store)):
            return self.refuse(wrong)
        return Arrays("KERN-05", parts=(exactly(store[slots]),), bits=True)

    def update(self, buffer: NDArray, new: NDArray, position: int) -> Expected:
        if not 0 <= position <= position + new.shape[2] <= buffer.shape[2]:
            raise ValueError("tokens that do not fit")
        want = buffer.copy()
        want[:, :, position : position + new.shape[2]] = new
        return Arrays("KERN-04", parts=(exactly(want),), bits=True)


def _wrong_slots(slots: NDArray, least: float, stop: int) -> Wrong:
    """What is wrong with slots that are to be integers of [least, stop) in one dimension."""
    wrong: Wrong = [] if slots.ndim == 1 else [("ShapeMismatch", "KERN-08")]
    if slots.dtype.kind not in "iu":
        return [*wrong, ("DtypeMismatch", "KERN-08")]
    if not all(least <= slot < stop for slot in slots.reshape(-1).tolist()):
        wrong.append(("SlotOutOfRange", "KERN-03"))
    return wrong


class Attention(Function):
    family = "attention"

    def attention(self, query: Any, keys: Any, values: Any, scale: float, causal: bool, length: int) -> Expected:
        query, keys, values = (float32(part) for part in (query, keys, values))
        if query.ndim != 3 or keys.ndim != 3 or query.shape[1] % keys.shape[1] or length > len(keys):
            raise ValueError("shapes that do not fit")
        keys, values = keys[:length], values[:length]
        reach = [float(np.abs(part).max(initial=0)) for part in (query, keys)]
        if not finite(query, keys, values) or reach[0] * reach[1] * query.shape[2] * max(1.0, abs(scale)) > 1e38:
            return Unjudged("ATTN-04")  # float32 scores overflow on the way
        out, bound = attention(query, keys, values, scale=scale, causal=causal)
        return Arrays("ATTN-04", parts=(Reads(out.astype(np.float32), bound + U * np.abs(out)),), always_slack=True)
