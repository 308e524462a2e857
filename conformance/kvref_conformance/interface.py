"""What an implementation offers to be judged: write these methods, leave out what you do not have.

An implementation is an object with a name, a version, a level, two conversions and a factory for each family it has. A factory
takes the family's sizes by keyword and returns an object with the methods below. Arrays go in and come out as the
implementation's own type: the judge makes them with `asarray` and reads them with `to_numpy`. A family, or a method, that is
missing is reported as *not offered*, never as passed.

Wrong use raises an exception whose class, or a base of it, is named as in kvref.errors: the name is all that counts.

Shapes stand beside the arrays: n tokens are [n, num_kv_heads, head_dim] (NHD), those of the contiguous cache [batch_size,
num_kv_heads, n, head_dim]. Values are read back as float32, or as a narrower float with the same values.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from kvref.array import Array

Level = Literal["exact", "tolerant"]

Numbers = Annotated[Array, "[n]"]
Codes = Annotated[Array, "[n]"]
Integers = Annotated[Array, "int64 [n]"]
RowsOf = Annotated[Array, "[n, width]"]
CodesOf = Annotated[Array, "[n, bytes per row]"]  # packed (FMT-SMALL-01), or [n, width]: a byte each
Scales = Annotated[Array, "[n] or [n, groups]"]
Store = Annotated[Array, "[num_slots, ...]"]
Slotted = Annotated[Array, "[n, ...]"]
Saved = Annotated[Array, "uint8 [n]"]  # the bytes of a file, in which a cache or a sequence is saved
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
    """Whether it has a factory for the family; None stands for none."""
    return getattr(implementation, family, None) is not None


class ExternalImplementation(ABC):
    """Base of the implementations that run outside this process: a program or a server. `close` ends the connection."""

    @abstractmethod
    def close(self) -> Any: ...


class Implementation(Protocol):
    """A factory named after each family in FAMILIES is looked up by that name, and may be missing."""

    name: str
    version: str
    language: str
    level: Level

    @property
    def formats(self) -> Sequence[str]:
        """Names of the formats that it supports, as kvref/spec/protocol.md lists them. A plain attribute is enough."""

    # project: what it is a part of, a string; its name, where it is left out.
    # limits: where it takes some sizes and formats only, which (see kvref_conformance.limits). May be left out.

    def asarray(self, values: Any) -> Array:
        """A NumPy array (any dtype) as an array of the implementation's own type, with memory of its own."""

    def to_numpy(self, array: Array) -> Any:
        """An array of the implementation's as a NumPy array (bfloat16 widened to float32)."""


class Statistics(Protocol):
    """What a family's statistics derive from: numbers by name, any of which may be missing."""
