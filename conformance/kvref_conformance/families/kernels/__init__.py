"""The family `kernels`: scatter, gather, copy and update without a cache."""

from typing import Protocol

import numpy as np

from kvref_conformance.families import Family
from kvref_conformance.implementation_api import Integers, Lanes, Memory, Slotted, Store
from kvref_conformance.testlib.sample_calls import SampleCalls, Sizes, args, counting_rows, on_family

FAMILY = Family(
    name="kernels",
    chapter="kernels",
)


# The typed protocol of kernels.

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


class KernelsFactory(Protocol):
    """The factory. It receives every size by name."""

    def __call__(self) -> Kernels: ...


# One call of each operation, for the self-test of a harness.


def sample_calls(sizes: Sizes) -> SampleCalls:
    tokens = counting_rows(2, sizes.heads, sizes.dim)
    lanes = counting_rows(1, sizes.heads, 2, sizes.dim)
    return {
        **on_family("kernels", {
            "scatter": args(store=counting_rows(4, sizes.heads, sizes.dim), slots=np.array([1, -1]), new=tokens),
            "gather": args(store=counting_rows(4, sizes.heads, sizes.dim), slots=np.array([3, 0])),
            "copy": args(
                store=counting_rows(4, sizes.heads, sizes.dim), sources=np.array([1]), targets=np.array([0]), block_size=2
            ),
            "update": args(buffer=counting_rows(1, sizes.heads, 4, sizes.dim), new=lanes, position=1),
        }),
    }  # fmt: skip
