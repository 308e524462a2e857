"""The typed protocol of kernels."""

from typing import Protocol

from kvref_conformance.interface import Integers, Lanes, Memory, Slotted, Store

# The errors that each operation can be required to raise. `new` raises ConfigError only.
ERRORS: dict[str, str] = {
    "scatter": "SlotOutOfRange ShapeMismatch DtypeMismatch",
    "copy": "SlotOutOfRange ShapeMismatch DtypeMismatch",
    "gather": "SlotOutOfRange ShapeMismatch DtypeMismatch",
}


class Kernels(Protocol):
    """Functions that move tokens by slot. Those that write return the store or buffer, which can be a new one."""

    def scatter(self, store: Store, slots: Integers, new: Slotted) -> Store: ...
    def gather(self, store: Store, slots: Integers) -> Slotted: ...
    def copy(self, store: Store, sources: Integers, targets: Integers, block_size: int) -> Store: ...
    def update(self, buffer: Memory, new: Lanes, position: int) -> Memory: ...


class Factory(Protocol):
    """The factory. It receives every size by name."""

    def __call__(self) -> Kernels: ...
