"""The reference model: the buffer pool as counts per size class, a buffer as a list of values."""

from typing import Any, ClassVar

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.expectations import (
    ExactValue,
    Expectation,
    ExpectedArrays,
    ExpectedError,
    NewResult,
    UnjudgedReply,
    array_errors,
    count_tokens,
    exact_reads,
    range_errors,
    to_float32,
)
from kvref_conformance.oracle.reference_model import ReadCall, ReferenceModel

SIZE_CLASSES = tuple(kib * 1024 for kib in (1, 4, 16, 64, 256))


def class_of(num_bytes: int) -> int:
    """Returns the smallest size class of at least `num_bytes`, or 0 if there is none."""
    return next((size for size in SIZE_CLASSES if num_bytes <= size), 0)


class Buffers(ReferenceModel):
    family = "buffers"
    clause_by_observation: ClassVar = {("prewarm", "stats"): "BUF-06", "stats": "BUF-03"}
    clause_after_error = "BUF-03"

    def __init__(self, *, max_buffers: int) -> None:
        super().__init__()
        self.most = max_buffers
        self.hits = self.misses = self.allocations = self.returns = self.drops = 0
        self.free = dict.fromkeys(SIZE_CLASSES, 0)

    def observations(self) -> list[ReadCall]:
        return [("stats", {})]

    def acquire(self, num_bytes: Any) -> Expectation:
        if wrong := range_errors(num_bytes, None, "PositionOutOfRange", "BUF-01"):
            return self.expect_error(wrong)
        if num_bytes > SIZE_CLASSES[-1]:
            return self.expect_error([("BufferTooLarge", "BUF-01")])
        then = self.on_success("acquire", lambda ok: self.serve(num_bytes))
        return NewResult("BUF-01", then, range_text="a buffer", model=lambda: Buffer(self, num_bytes))

    def serve(self, num_bytes: int) -> None:
        """Serve one request."""
        size = class_of(num_bytes)
        self.hits += bool(self.free[size])
        self.misses += not self.free[size]
        self.allocations += not self.free[size]
        self.free[size] = max(0, self.free[size] - 1)

    def put_back(self, size: int) -> None:
        self.returns += 1
        self.drops += self.free[size] == self.most
        self.free[size] = min(self.most, self.free[size] + 1)

    def prewarm(self, size: Any, count: Any) -> Expectation:
        wrong = [] if size in SIZE_CLASSES else [("ConfigError", "BUF-06")]
        if wrong := wrong + range_errors(count, None, "PositionOutOfRange", "BUF-06"):
            return self.expect_error(wrong)

        def change(ok: Any) -> None:
            more = min(count, self.most - self.free[size])
            self.free[size] += more
            self.allocations += more

        return Expectation("BUF-06", self.on_success("prewarm", change))

    def clear(self) -> Expectation:
        return Expectation("BUF-09", self.on_success("clear", lambda ok: self.free.update(dict.fromkeys(SIZE_CLASSES, 0))))

    def stats(self) -> Expectation:
        requests = self.hits + self.misses
        want = {
            "hits": self.hits, "misses": self.misses, "allocations": self.allocations, "returns": self.returns,
            "drops": self.drops, "hit_rate": self.hits / requests if requests else 0.0, "free": dict(self.free),
        }  # fmt: skip
        returns = "BUF-05" if self.last_change == "released twice" else self.clause_of("stats")
        clauses = {"hit_rate": "BUF-07", "returns": returns, "drops": "BUF-04"}
        return ExactValue(self.clause_of("stats"), value=want, clauses=clauses)


class Buffer(ReferenceModel):
    family = "buffer"
    clause_by_observation: ClassVar = {
        ("new", "length"): "LAW-05", ("new", "values"): "LAW-05", ("extend", "values"): "BUF-02",
        "length": "BUF-09", "values": "BUF-09",
    }  # fmt: skip
    clause_after_error = "BUF-09"

    def __init__(self, pool: Buffers, num_bytes: int) -> None:
        super().__init__()
        self.pool = pool
        self.bytes = class_of(num_bytes)
        self.written: list[NDArray] = []
        self.in_use = True

    def observations(self) -> list[ReadCall]:
        sizes: list[ReadCall] = [("size", {}), ("capacity", {})] if self.last_change == "new" else []
        return [*sizes, ("length", {}), ("values", {})] if self.in_use else [("values", {})]

    def size(self) -> Expectation:
        return ExactValue("BUF-01", value=self.bytes)

    def capacity(self) -> Expectation:
        return ExactValue("BUF-01", value=self.bytes // 4)

    def length(self) -> Expectation:
        return ExactValue(self.clause_of("length"), value=len(self._values())) if self.in_use else UnjudgedReply("BUF-09")

    def address(self) -> Expectation:
        return UnjudgedReply("BUF-02")

    def _values(self) -> NDArray:
        return np.concatenate([np.zeros(0, np.float32), *self.written])

    def values(self) -> Expectation:
        if not self.in_use:
            return ExpectedError("BUF-09", kinds=("BufferReleased",))
        return ExpectedArrays(self.clause_of("values"), parts=(exact_reads(self._values()),))

    def extend(self, values: Any) -> Expectation:
        wrong = [(kind, "BUF-09") for kind, _ in array_errors((values, (None,)))]
        written = len(self._values()) if self.in_use else 0
        if not self.in_use:
            wrong.append(("BufferReleased", "BUF-09"))
        if written + count_tokens((values, (None,))) > self.bytes // 4:
            wrong.append(("CapacityExceeded", "BUF-09"))
        if wrong:
            return self.expect_error(wrong)
        return Expectation("BUF-09", self.on_success("extend", lambda ok: self.written.append(to_float32(values))))

    def clear(self) -> Expectation:
        if not self.in_use:
            return self.expect_error([("BufferReleased", "BUF-09")])
        return Expectation("BUF-09", self.on_success("clear", lambda ok: self.written.clear()))

    def release(self) -> Expectation:
        def change(ok: Any) -> None:
            if self.in_use:
                self.pool.note_change("release")
                self.pool.put_back(self.bytes)
            else:
                self.pool.note_unchanged("released twice")
            self.in_use = False

        return Expectation("BUF-05", self.on_success("release", change))
