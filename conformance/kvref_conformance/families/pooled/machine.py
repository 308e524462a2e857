"""The state machine of the family `pooled`."""

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.searching.machine import COUNT, Machine, one_of, pair
from kvref_conformance.searching.rows import kinds

INDEX = st.integers(0, 5)
SIZE = st.integers(1, 3)


class PooledMachine(Machine):
    family = "pooled"

    @initialize(
        heads=SIZE, dim=st.sampled_from((1, 3, 300)), block=st.sampled_from((1, 2, 3, 4, 300)),
        most=st.sampled_from((3, 7, 4, 8, 12)), caches=st.integers(1, 2), buffers=st.integers(1, 3),
    )  # fmt: skip
    def new(self, heads: int, dim: int, block: int, most: int, caches: int, buffers: int) -> None:
        can_share = caches > 1 and hasattr(self.search.implementation, "buffers")
        shared = {"pool": self.another("buffers", max_buffers=buffers)} if can_share else {}
        for _ in range(caches):
            self.make(num_kv_heads=heads, head_dim=dim, tokens_per_block=block, max_tokens=max(most, block), **shared)
        if self.objects:
            self.shape = self.config["num_kv_heads"], self.config["head_dim"]

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, count=COUNT | COUNT | st.integers(6, 16), kind=kinds())
    def append(self, which: int, count: int, kind: str) -> None:
        keys, values = pair(self.source, (count, *self.shape), kind)
        self.call("append", one_of(self.objects, which), keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, wrong=st.integers(0, 5), side=st.integers(0, 2))
    def append_wrongly(self, which: int, wrong: int, side: int) -> None:
        keys, values = self.source.wrong_pair((2, *self.shape), wrong, side)
        self.call("append", one_of(self.objects, which), keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, count=COUNT, kind=kinds())
    def clear(self, which: int, count: int, kind: str) -> None:
        self.call("clear", one_of(self.objects, which))
        self.append(which, count, kind)
