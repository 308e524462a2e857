"""The JSON form of values, used in pipes and in trace files.

An array is {"dtype", "shape", "base64"}, little-endian and in C order; with an empty shape it is a scalar of that dtype. An
object is {"handle": id}. The result of an earlier request is {"reply": id}. Numbers that JSON lacks are {"number": "nan"},
"inf" and "-inf".
"""

import base64
import math
from typing import Any

import numpy as np

from kvref_conformance.calls.messages import CallReply, ObjectReference, ReplyReference
from kvref_conformance.implementation_api import NDArray

DTYPES = (
    "float32", "float64", "float16", "bfloat16", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip


class NotSerializable(Exception):
    """A JSON value is malformed. The message states the problem."""


class PackageMissing(NotSerializable):
    """This process lacks a package that it needs to read the value. The value is right."""


def to_wire(value: Any) -> Any:
    """Convert a value to a form that json.dumps accepts."""
    if isinstance(value, ObjectReference):
        return {"handle": value.id}
    if isinstance(value, ReplyReference):
        return {"reply": value.id}
    if isinstance(value, np.ndarray | np.generic):
        return _array_to_wire(np.asarray(value))
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": str(value)}
    if isinstance(value, dict):
        return {str(name): to_wire(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [to_wire(part) for part in value]
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _array_to_wire(array: NDArray) -> dict[str, Any]:
    little = array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array
    text = base64.b64encode(np.ascontiguousarray(little).tobytes()).decode("ascii")
    return {"dtype": array.dtype.name, "shape": list(array.shape), "base64": text}


def from_wire(value: Any) -> Any:
    """The inverse of `to_wire`. Raises NotSerializable."""
    if isinstance(value, list):
        return [from_wire(part) for part in value]
    if not isinstance(value, dict):
        return value
    if "base64" in value:
        return _array_from_wire(value)
    if set(value) == {"handle"}:
        return ObjectReference(value["handle"])
    if set(value) == {"reply"}:
        return ReplyReference(value["reply"])
    if set(value) == {"number"}:
        return float(value["number"])
    return {name: from_wire(part) for name, part in value.items()}


def _array_from_wire(value: dict[str, Any]) -> NDArray:
    if set(value) != {"dtype", "shape", "base64"} or value["dtype"] not in DTYPES:
        raise NotSerializable(f"array: expected dtype (one of {', '.join(DTYPES)}), shape and base64, got {sorted(value)}")
    try:
        raw = base64.b64decode(value["base64"], validate=True)
        array = np.frombuffer(raw, dtype=_dtype(value["dtype"])).reshape(value["shape"])
    except (ValueError, TypeError) as error:
        raise NotSerializable(f"array: {error}") from None
    return array.copy()[()]  # [()] converts an array without axes to a scalar


def _dtype(name: str) -> Any:
    if name != "bfloat16":
        return np.dtype(name)
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise PackageMissing("bfloat16 arrays (the judge needs ml_dtypes to read them: pip install ml_dtypes)") from None
    return np.dtype(bfloat16)


def reply_to_wire(reply: CallReply | None) -> dict[str, Any]:
    if reply is None:
        return {"none": True}
    if reply.error:
        return {"error": {"kind": reply.error.kind, "message": reply.error.message}}
    return {"ok": to_wire(reply.ok)}
