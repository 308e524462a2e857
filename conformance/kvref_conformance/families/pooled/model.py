"""The reference model of the pooled cache: a list of tokens."""

from typing import Any, ClassVar

import numpy as np

from kvref_conformance.families.buffers.model import Buffers, class_of
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.expectations import (
    AcceptedOrError,
    AnyOf,
    ExactValue,
    Expectation,
    ExpectedArrays,
    all_finite,
    array_errors,
    count_tokens,
    exact_reads,
    finite_errors,
    to_float32,
)
from kvref_conformance.oracle.reference_model import ReadCall, ReferenceModel


class Pooled(ReferenceModel):
    family = "pooled"
    clause_by_observation: ClassVar = {
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

    def observations(self) -> list[ReadCall]:
        return [("total_tokens", {}), ("stats", {}), ("read", {})]

    def total_tokens(self) -> Expectation:
        return ExactValue(self.clause_of("total_tokens"), value=len(self.tokens))

    def append(self, keys: Any, values: Any) -> Expectation:
        arrays = (keys, (None, *self.row)), (values, (None, *self.row))
        wrong, count = array_errors(*arrays), count_tokens(*arrays)
        total = len(self.tokens) + count
        num_evicted = max(0, -(-(total - self.most) // self.per_block))  # whole blocks, until the rest fits
        left = total - num_evicted * self.per_block
        num_opened = -(-left // self.per_block) - max(0, self.blocks - num_evicted)
        if num_opened > 0 and not self.size:
            wrong.append(("BufferTooLarge", "POOL-04"))
        if wrong:
            return self.expect_error(wrong + finite_errors(keys, values))

        def change(ok: Any) -> None:
            before, self.evicted = self.blocks, num_evicted > 0
            rows = list(zip(to_float32(keys), to_float32(values), strict=True))
            self.tokens = (self.tokens + rows)[num_evicted * self.per_block :]
            for _ in range(2 * num_opened):  # before anything is evicted, because acquire can raise
                self.pool.serve(self.bytes)
            for _ in range(2 * min(num_evicted, before)):
                self.pool.put_back(self.size)

        then = self.on_success("append", change)
        return Expectation("POOL-02", then) if all_finite(keys, values) else AcceptedOrError("POOL-02", then)

    def read(self) -> Expectation:
        parts = [np.array([token[which] for token in self.tokens], np.float32).reshape(-1, *self.row) for which in (0, 1)]
        clause = "POOL-03" if self.evicted else "POOL-02"
        return ExpectedArrays(clause if self.last_change == "append" else self.clause_of("read"), names=("keys", "values"),
                      parts=(exact_reads(parts[0]), exact_reads(parts[1])))  # fmt: skip

    def clear(self) -> Expectation:
        def change(ok: Any) -> None:
            for _ in range(2 * self.blocks):
                self.pool.put_back(self.size)
            self.tokens, self.evicted = [], False

        return Expectation("POOL-05", self.on_success("clear", change))

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

        clause = "POOL-01" if self.last_change == "append" and not self.evicted else self.clause_of("stats")
        return AnyOf(clause, range_text=f"{want}, and {live} buffers of the pool in use", accepts=accepts)
