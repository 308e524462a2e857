"""The interface between an implementation and the judge: the protocol `Implementation`, and types for arrays with their shapes.

An implementation is an object with a name, a version, a level, a list of formats, two array conversions, and a factory for each
family that it provides. A factory takes the family's sizes as keyword arguments and returns an object with the methods of the
family's protocol (families/*/__init__.py). All factories and methods are optional: a missing one is reported as *not
offered*, never as passed.

Arguments and results are arrays of the implementation's own type. The judge creates them with `asarray` and reads them with
`to_numpy`. Results are float32, or a narrower float type with the same values.

Errors are exceptions. Only the name of the class counts: it, or the name of one of its bases, must be a name in kvref.errors.

The annotations below give the shapes: n tokens are [n, num_kv_heads, head_dim] (NHD), in the contiguous cache [batch_size,
num_kv_heads, n, head_dim].
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol, TypeAlias

import numpy.typing

from kvref.array import Array

Level = Literal["exact", "tolerant"]

Numbers = Annotated[Array, "[n]"]
Codes = Annotated[Array, "[n]"]
Integers = Annotated[Array, "int64 [n]"]
RowsOf = Annotated[Array, "[n, width]"]
CodesOf = Annotated[Array, "[n, bytes per row]"]  # packed (FMT-SMALL-01), or [n, width] with one byte per code
Scales = Annotated[Array, "[n] or [n, groups]"]
Store = Annotated[Array, "[num_slots, ...]"]
Slotted = Annotated[Array, "[n, ...]"]
Saved = Annotated[Array, "uint8 [n]"]  # the bytes of the file in which a cache or a sequence is saved
HeadNumbers = Annotated[Array, "[num_query_heads]"]
HeadRow = Annotated[Array, "[head_dim]"]
Token = Annotated[Array, "[num_kv_heads, head_dim]"]
Tokens = Annotated[Array, "[n, num_kv_heads, head_dim]"]
Step = Annotated[Array, "[num_layers, num_kv_heads, head_dim]"]
Batch = Annotated[Array, "[sequences, num_kv_heads, head_dim]"]
BatchStep = Annotated[Array, "[num_layers, sequences, num_kv_heads, head_dim]"]
Offsets = Annotated[Array, "[sequences + 1]"]
Tables = Annotated[Array, "[sequences, max blocks]"]
Query = Annotated[Array, "[num_queries, num_query_heads, head_dim]"]
Values = Annotated[Array, "[n, num_kv_heads, value_dim]"]
Attended = Annotated[Array, "[num_queries, num_query_heads, value_dim]"]
Lanes = Annotated[Array, "[batch_size, num_kv_heads, n, head_dim]"]
FusedLanes = Annotated[Array, "[2, batch_size, num_kv_heads, n, head_dim]"]
Memory = Annotated[Array, "[batch_size, num_kv_heads, capacity, head_dim]"]


def offers(implementation: Any, family: str) -> bool:
    """Whether the implementation has a factory for the family. An attribute that is None counts as missing."""
    return getattr(implementation, family, None) is not None


class ExternalImplementation(ABC):
    """Base class of implementations that run in another process: a program or a server. `close` ends the connection."""

    @abstractmethod
    def close(self) -> Any: ...


class Implementation(Protocol):
    """The object that the judge judges. Beside these members it has a factory for each family that it provides, named after it.

    Two more attributes are optional. project: the name of the project that it belongs to (default: `name`). limits: the sizes
    and formats that it supports, if it does not support all (see kvref_conformance.limits).
    """

    name: str
    version: str
    language: str
    level: Level

    @property
    def formats(self) -> Sequence[str]:
        """Names of the formats that it supports, as kvref/spec/protocol.md lists them. A plain attribute is enough."""

    def asarray(self, values: Any) -> Array:
        """Copy a NumPy array (any dtype) to an array of the implementation's own type. The two must not share memory."""

    def to_numpy(self, array: Array) -> Any:
        """Convert an array of the implementation's own type to a NumPy array (bfloat16 widened to float32)."""


class Statistics(Protocol):
    """Base class of the families' statistics: numbers by name. An implementation may leave out any of them."""


# The type of NumPy arrays in the judge: any dtype, because values, codes and bits use the same functions.

NDArray: TypeAlias = numpy.typing.NDArray[Any]


def same_bits(one: NDArray, other: NDArray) -> bool:
    """Whether two arrays have the same dtype, shape and bits. Fast, because this is nearly always the case."""
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
