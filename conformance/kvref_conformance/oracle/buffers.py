"""The buffer pool as counts by size class, a buffer as a list of values, and the pooled cache as a list of tokens."""

from typing import Any, ClassVar

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.oracle.expected import (
    Arrays,
    Choice,
    Expected,
    Refused,
    TakenOrRefused,
    Unjudged,
    Value,
    exactly,
    finite,
    float32,
    not_in_range,
    wrong_arrays,
)  # fmt: skip
from kvref_conformance.oracle.model import Look, Model

CLASSES = tuple(kib * 1024 for kib in (1, 4, 16, 64, 256))
RELEASED = ("BufferReleased",)


class Buffers(Model):
    family = "buffers"
    blamed: ClassVar = {("prewarm", "stats"): "BUF-06", "stats": "BUF-03"}
    blamed_after_refusal = "BUF-03"

    def __init__(self, *, max_buffers: int) -> None:
        super().__init__()
        self.most = max_buffers
        self.hits = self.misses = self.allocations = self.returns = self.drops = 0
        self.free = dict.fromkeys(CLASSES, 0)

    def looks(self) -> list[Look]:
        return [("stats", {})]

    def acquire(self, num_bytes: Any) -> Expected:
        if wrong := not_in_range(num_bytes, None, "PositionOutOfRange", "BUF-01"):
            return self.refuse(wrong)
        if num_bytes > CLASSES[-1]:
            return self.refuse([("BufferTooLarge", "BUF-01")])
        return Choice("BUF-01", self.did("acquire", lambda ok: self.take(num_bytes)), says="a buffer")

    def take(self, num_bytes: int) -> None:
        """Serve one request."""
        size = next(size for size in CLASSES if num_bytes <= size)
        self.hits += bool(self.free[size])
        self.misses += not self.free[size]
        self.allocations += not self.free[size]
        self.free[size] = max(0, self.free[size] - 1)

    def give_back(self, size: int) -> None:
        self.returns += 1
        self.drops += self.free[size] == self.most
        self.free[size] = min(self.most, self.free[size] + 1)

    def prewarm(self, size: Any, count: Any) -> Expected:
        wrong = [] if size in CLASSES else [("ConfigError", "BUF-06")]
        if wrong := wrong + not_in_range(count, None, "PositionOutOfRange", "BUF-06"):
            return self.refuse(wrong)

        def change(ok: Any) -> None:
            more = min(count, self.most - self.free[size])
            self.free[size] += more
            self.allocations += more

        return Expected("BUF-06", self.did("prewarm", change))

    def clear(self) -> Expected:
        return Expected("BUF-09", self.did("clear", lambda ok: self.free.update(dict.fromkeys(CLASSES, 0))))

    def stats(self) -> Expected:
        requests = self.hits + self.misses
        want = {
            "hits": self.hits, "misses": self.misses, "allocations": self.allocations, "returns": self.returns,
            "drops": self.drops, "hit_rate": self.hits / requests if requests else 0.0, "free": dict(self.free),
        }  # fmt: skip
        returns = "BUF-05" if self.last == "released twice" else self.blame("stats")
        clauses = {"hit_rate": "BUF-07", "returns": returns, "drops": "BUF-04"}
        return Value(self.blame("stats"), value=want, clauses=clauses)


class Buffer(Model):
    family = "buffer"
    blamed: ClassVar = {
        ("new", "length"): "LAW-05", ("new", "values"): "LAW-05", ("extend", "values"): "BUF-02",
        "length": "BUF-09", "values": "BUF-09",
    }  # fmt: skip
    blamed_after_refusal = "BUF-09"

    def __init__(self, pool: Buffers, num_bytes: int) -> None:
        super().__init__()
        self.pool = pool
        self.bytes = next(size for size in CLASSES if num_bytes <= size)
        self.written: list[NDArray] = []
        self.held = True
        self.unknown = False

    def looks(self) -> list[Look]:
        sizes: list[Look] = [("size", {}), ("capacity", {})] if self.last == "new" else []
        return [*sizes, ("length", {}), ("values", {})] if self.held else [("values", {})]

    def size(self) -> Expected:
        return Value("BUF-01", value=self.bytes)

    def capacity(self) -> Expected:
        return Value("BUF-01", value=self.bytes // 4)

    def length(self) -> Expected:
        return Value(self.blame("length"), value=len(self._values())) if self.held else Unjudged("BUF-09")

    def address(self) -> Expected:
        return Unjudged("BUF-02")

    def _values(self) -> NDArray:
        return np.concatenate([np.zeros(0, np.float32), *self.written])

    def values(self) -> Expected:
        if not self.held:
            return Refused("BUF-09", kinds=RELEASED)
        return Arrays(self.blame("values"), parts=(exactly(self._values()),))

    def extend(self, values: Any) -> Expected:
        wrong = [(kind, "BUF-09") for kind, _ in wrong_arrays((values, (None,)))]
        if not self.held:
            wrong.append(("BufferReleased", "BUF-09"))
        elif not wrong and len(self._values()) + len(values) > self.bytes // 4:
            wrong.append(("CapacityExceeded", "BUF-09"))
        if wrong:
            return self.refuse(wrong)
        return Expected("BUF-09", self.did("extend", lambda ok: self.written.append(float32(values))))

    def clear(self) -> Expected:
        if not self.held:
            return self.refuse([("BufferReleased", "BUF-09")])
        return Expected("BUF-09", self.did("clear", lambda ok: self.written.clear()))

    def release(self) -> Expected:
        def change(ok: Any) -> None:
            self.pool.last = "release" if self.held else "released twice"
            if self.held:
                self.pool.give_back(self.bytes)
            self.held = False

        return Expected("BUF-05", self.did("release", change))


class Pooled(Model):
    family = "pooled"
    blamed: ClassVar = {
        ("append", "total_tokens"): "POOL-03", ("clear", "total_tokens"): "POOL-05", ("clear", "stats"): "POOL-05",
        "total_tokens": "POOL-06", "stats": "POOL-06",
    }  # fmt: skip

    def __init__(
        self, *, num_kv_heads: int, head_dim: int, tokens_per_block: int, max_tokens: int, pool: Buffers | None = None
    ) -> None:
        super().__init__()
        self.row, self.per_block, self.most = (num_kv_heads, head_dim), tokens_per_block, max_tokens
        self.pool = Buffers(max_buffers=32) if pool is None else pool
        self.shared = pool is not None
        self.bytes = tokens_per_block * num_kv_heads * head_dim * 4
        self.tokens: list[tuple[NDArray, NDArray]] = []
        self.evicted = False

    @property
    def blocks(self) -> int:
        return -(-len(self.tokens) // self.per_block)  # only whole blocks go, so all but the last are full

    def looks(self) -> list[Look]:
        return [("total_tokens", {}), ("stats", {}), ("read", {})]

    def total_tokens(self) -> Expected:
        return Value(self.blame("total_tokens"), value=len(self.tokens))

    def append(self, keys: Any, values: Any) -> Expected:
        shape = (None, *self.row)
        if wrong := wrong_arrays((keys, shape), (values, shape)):
            return self.refuse(wrong)
        total = len(self.tokens) + len(keys)
        gone = max(0, -(-(total - self.most) // self.per_block))  # whole blocks, until it fits
        left = total - gone * self.per_block
        opened = -(-left // self.per_block) - max(0, self.blocks - gone)
        if opened > 0 and self.bytes > CLASSES[-1]:
            return self.refuse([("BufferTooLarge", "POOL-04")])

        def change(ok: Any) -> None:
            before, self.evicted = self.blocks, gone > 0
            rows = list(zip(float32(keys), float32(values), strict=True))
            self.tokens = (self.tokens + rows)[gone * self.per_block :]
            for _ in range(2 * opened):  # before anything goes: it may raise
                self.pool.take(self.bytes)
            for _ in range(2 * min(gone, before)):
                self.pool.give_back(next(size for size in CLASSES if self.bytes <= size))

        then = self.did("append", change)
        return Expected("POOL-02", then) if finite(keys, values) else TakenOrRefused("POOL-02", then)

    def read(self) -> Expected:
        parts = [np.array([token[which] for token in self.tokens], np.float32).reshape(-1, *self.row) for which in (0, 1)]
        clause = "POOL-03" if self.evicted else "POOL-02"
        return Arrays(clause if self.last == "append" else self.blame("read"), names=("keys", "values"),
                      parts=(exactly(parts[0]), exactly(parts[1])))  # fmt: skip

    def clear(self) -> Expected:
        def change(ok: Any) -> None:
            for _ in range(2 * self.blocks):
                self.pool.give_back(next(size for size in CLASSES if self.bytes <= size))
            self.tokens, self.evicted = [], False

        return Expected("POOL-05", self.did("clear", change))

    def stats(self) -> Expected:
        live = 2 * self.blocks
        size = next((size for size in CLASSES if self.bytes <= size), 0)
        want = {
            "total_tokens": len(self.tokens),
            "num_blocks": self.blocks,
            "tokens_per_block": self.per_block,
            "bytes": live * size,
        }

        def accepts(got: Any) -> bool:
            pool = got.get("pool", {})
            counted = self.shared or not {"hits", "misses", "returns"} <= set(pool)
            right = counted or pool["hits"] + pool["misses"] - pool["returns"] == live
            return right and all(got[name] == value for name, value in want.items() if name in got)

        clause = "POOL-01" if self.last == "append" and not self.evicted else self.blame("stats")
        return Choice(clause, says=f"{want}, and {live} buffers of the pool in use", accepts=accepts)
