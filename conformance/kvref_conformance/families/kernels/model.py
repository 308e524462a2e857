"""The reference model: the contents of a store or buffer after a kernel."""

import math

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.expectations import Errors, Expectation, ExpectedArrays, exact_reads  # fmt: skip
from kvref_conformance.oracle.reference_model import FunctionModel


class Kernels(FunctionModel):
    family = "kernels"

    def scatter(self, store: NDArray, slots: NDArray, new: NDArray) -> Expectation:
        slots = np.asarray(slots)
        wrong = _wrong_slots(slots, -math.inf, len(store))
        if new.shape != (*slots.shape[:1], *store.shape[1:]):
            wrong.append(("ShapeMismatch", "KERN-03"))
        if new.dtype != store.dtype:
            wrong.append(("DtypeMismatch", "KERN-03"))
        if wrong:
            return self.expect_error(wrong)
        want, unsure = store.copy(), np.zeros(store.shape, bool)
        for slot, token in zip(slots.tolist(), new, strict=True):
            if slot >= 0:
                want[slot] = token
                unsure[slot] = (slots == slot).sum() > 1  # contains one of the tokens, unmixed (KERN-07)
        return ExpectedArrays("KERN-01", parts=(exact_reads(want),), bits=True, undetermined=unsure if unsure.any() else None)

    def gather(self, store: NDArray, slots: NDArray) -> Expectation:
        slots = np.asarray(slots)
        if wrong := _wrong_slots(slots, 0, len(store)):
            return self.expect_error(wrong)
        return ExpectedArrays("KERN-05", parts=(exact_reads(store[slots]),), bits=True)

    def copy(self, store: NDArray, sources: NDArray, targets: NDArray, block_size: int) -> Expectation:
        if block_size < 1:
            raise ValueError("block_size: expected at least 1")
        sources, targets, blocks = np.asarray(sources), np.asarray(targets), len(store) // block_size
        wrong = [each for numbers in (sources, targets) for each in _wrong_slots(numbers, 0, blocks)]
        if sources.shape != targets.shape:
            wrong.append(("ShapeMismatch", "KERN-09"))
        if wrong:
            return self.expect_error([(kind, "KERN-09") for kind, _ in wrong])
        want, unsure = store.copy(), np.zeros(store.shape, bool)
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            here = slice(target * block_size, (target + 1) * block_size)
            want[here] = store[source * block_size : (source + 1) * block_size]
            unsure[here] = (targets == target).sum() > 1  # contains one of the sources, unmixed (KERN-09)
        return ExpectedArrays("KERN-09", parts=(exact_reads(want),), bits=True, undetermined=unsure if unsure.any() else None)

    def update(self, buffer: NDArray, new: NDArray, position: int) -> Expectation:
        if not 0 <= position <= position + new.shape[2] <= buffer.shape[2]:
            raise ValueError("update: the tokens do not fit into the buffer")
        want = buffer.copy()
        want[:, :, position : position + new.shape[2]] = new
        return ExpectedArrays("KERN-04", parts=(exact_reads(want),), bits=True)


def _wrong_slots(slots: NDArray, least: float, stop: int) -> Errors:
    """Returns the errors that slots can raise; valid slots are a 1-D array of integers in [least, stop)."""
    wrong: Errors = [] if slots.ndim == 1 else [("ShapeMismatch", "KERN-08")]
    if slots.dtype.kind not in "iu":
        return [*wrong, ("DtypeMismatch", "KERN-08")]
    if not all(least <= slot < stop for slot in slots.reshape(-1).tolist()):
        wrong.append(("SlotOutOfRange", "KERN-03"))
    return wrong
