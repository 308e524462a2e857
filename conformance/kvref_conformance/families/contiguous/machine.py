"""The state machine of the family `contiguous`."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.arrays import NDArray
from kvref_conformance.families.contiguous.model import Contiguous
from kvref_conformance.searching.machine import ANY, BACK, COUNT, Machine, one_of, pair, within
from kvref_conformance.searching.rows import kinds

INDEX = st.integers(0, 5)
SIZE = st.integers(1, 3)


class ContiguousMachine(Machine):
    family = "contiguous"

    @initialize(
        batch=st.sampled_from((1, 2, 2)), heads=SIZE, dim=SIZE, initial=st.integers(0, 4), most=st.sampled_from((1, 8, 12, 7, 3)),
        dtype=st.sampled_from(("float32", "float16", "bfloat16")), twice=st.booleans(),
    )  # fmt: skip
    def new(self, batch: int, heads: int, dim: int, initial: int, most: int, dtype: str, twice: bool) -> None:
        for _ in range(1 + twice):
            self.make(batch_size=batch, num_kv_heads=heads, head_dim=dim, initial_capacity=initial, max_seq_len=most, dtype=dtype)

    def model(self, which: int) -> Contiguous:
        """Returns the reference model of one of the caches."""
        found = self.witness.models[one_of(self.objects, which) or 0]
        assert isinstance(found, Contiguous)
        return found

    def some(self, which: int, count: int, kind: str) -> tuple[NDArray, NDArray]:
        batch, heads, dim = self.model(which).sizes
        return pair(self.source, (batch, heads, count, dim), kind)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, count=COUNT, kind=kinds(), fused=st.booleans())
    def append(self, which: int, count: int, kind: str, fused: bool) -> None:
        keys, values = self.some(which, count, kind)
        if fused:
            self.call("append_fused", one_of(self.objects, which), key_values=np.stack([keys, values]))
        else:
            self.call("append", one_of(self.objects, which), keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, wrong=st.integers(0, 5), side=st.integers(0, 2))
    def append_wrongly(self, which: int, wrong: int, side: int) -> None:
        batch, heads, dim = self.model(which).sizes
        keys, values = self.source.wrong_pair((batch, heads, 1, dim), wrong, side)
        self.call("append", one_of(self.objects, which), keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, count=st.integers(-1, 3))
    def advance(self, which: int, count: int) -> None:
        self.call("advance", one_of(self.objects, which), count=count)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, back=BACK, count=COUNT, kind=kinds())
    def truncate(self, which: int, back: int, count: int, kind: str) -> None:
        self.call("truncate", one_of(self.objects, which), length=len(self.model(which).tokens) - back)
        self.append(which, count, kind, fused=False)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, rows=st.lists(ANY, min_size=1, max_size=3), count=COUNT, kind=kinds())
    def reorder(self, which: int, rows: list[int], count: int, kind: str) -> None:
        batch, size = self.model(which).sizes[0], self.subject.size("batch_size", len(rows))
        self.call("reorder", one_of(self.objects, which), rows=[within(rows[i % len(rows)], batch) for i in range(size)])
        self.append(which, count, kind, fused=False)

    reorder_again = reorder

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, count=COUNT, kind=kinds())
    def reset(self, which: int, count: int, kind: str) -> None:
        self.call("reset", one_of(self.objects, which))
        self.append(which, count, kind, fused=False)
