"""The reference model of the pooled cache: a list of tokens."""

from typing import Any, ClassVar

import numpy as np

from kvref_conformance.families.buffers.model import Buffers, class_of
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.expectations import (  # fmt: skip
    AcceptedOrError,
    AnyOf,
    ExactValue,
    Expectation,
    ExpectedArrays,
    exactly,
    finite,
    float32,
    not_finite,
    tokens_of,
    wrong_arrays,
)
from kvref_conformance.oracle.reference_model import Look, ReferenceModel


class Pooled(ReferenceModel):
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
        self.size = class_of(self.bytes)
        self.tokens: list[tuple[NDArray, NDArray]] = []
        self.evicted = False

    @property
    def blocks(self) -> int:
        return -(-len(self.tokens) // self.per_block)  # whole blocks are evicted, so that all but the last are full

    def looks(self) -> list[Look]:
        return [("total_tokens", {}), ("stats", {}), ("read", {})]

    def total_tokens(self) -> Expectation:
        return ExactValue(self.blame("total_tokens"), value=len(self.tokens))

    def append(self, keys: Any, values: Any) -> Expectation:
        arrays = (keys, (None, *self.row)), (values, (None, *self.row))
        wrong, count = wrong_arrays(*arrays), tokens_of(*arrays)
        total = len(self.tokens) + count
        num_evicted = max(0, -(-(total - self.most) // self.per_block))  # whole blocks, until the rest fits
        left = total - num_evicted * self.per_block
        num_opened = -(-left // self.per_block) - max(0, self.blocks - num_evicted)
        if num_opened > 0 and not self.size:
            wrong.append(("BufferTooLarge", "POOL-04"))
        if wrong:
            return self.refuse(wrong + not_finite(keys, values))

        def change(ok: Any) -> None:
            before, self.evicted = self.blocks, num_evicted > 0
            rows = list(zip(float32(keys), float32(values), strict=True))
            self.tokens = (self.tokens + rows)[num_evicted * self.per_block :]
            for _ in range(2 * num_opened):  # before anything is evicted, because acquire can raise
                self.pool.serve(self.bytes)
            for _ in range(2 * min(num_evicted, before)):
                self.pool.put_back(self.size)

        then = self.did("append", change)
        return Expectation("POOL-02", then) if finite(keys, values) else AcceptedOrError("POOL-02", then)

    def read(self) -> Expectation:
        parts = [np.array([token[which] for token in self.tokens], np.float32).reshape(-1, *self.row) for which in (0, 1)]
        clause = "POOL-03" if self.evicted else "POOL-02"
        return ExpectedArrays(clause if self.last == "append" else self.blame("read"), names=("keys", "values"),
                      parts=(exactly(parts[0]), exactly(parts[1])))  # fmt: skip

    def clear(self) -> Expectation:
        def change(ok: Any) -> None:
            for _ in range(2 * self.blocks):
                self.pool.put_back(self.size)
            self.tokens, self.evicted = [], False

        return Expectation("POOL-05", self.did("clear", change))

    def stats(self) -> Expectation:
        live = 2 * self.blocks
        want = {
            "total_tokens": len(self.tokens),
            "num_blocks": self.blocks,
            "tokens_per_block": self.per_block,
            "bytes": live * self.size,
        }

        def accepts(got: Any) -> bool:
            pool = got.get("pool", {})
            counted = self.shared or not {"hits", "misses", "returns"} <= set(pool)
            right = counted or pool["hits"] + pool["misses"] - pool["returns"] == live
            return right and all(got[name] == value for name, value in want.items() if name in got)

        clause = "POOL-01" if self.last == "append" and not self.evicted else self.blame("stats")
        return AnyOf(clause, says=f"{want}, and {live} buffers of the pool in use", accepts=accepts)
