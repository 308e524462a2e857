"""The state machine of the family `windowed`."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.windowed.model import Windowed
from kvref_conformance.oracle.formats import group_of
from kvref_conformance.searching.machine import BACK, COUNT, Machine, pair
from kvref_conformance.searching.rows import kinds

# Formats with scales: one scale per head, scales among the codes, a zero per group, a static scale, and rotated values.
DTYPES = (
    "float32", "float32", "float16", "bfloat16", "float32", "float16", "int8", "q8_0", "uint4_g32_float32",
    "float8_e4m3fn_static", "q8_0_hadamard",
)  # fmt: skip
SIZE = st.integers(1, 2)
GROUP = st.integers(1, 2)


class WindowedMachine(Machine):
    family = "windowed"

    @initialize(
        heads=SIZE, dim=st.integers(1, 3), window=st.sampled_from((3, 1, 4, 7, 2)), sinks=st.sampled_from((0, 0, 2, 0, 1, 5)),
        chunk=st.sampled_from((0, 0, 0, 3, 4)), rollback=st.sampled_from((0, 2, 0, 3)),
        both=st.sampled_from((False, False, True)), dtype=st.sampled_from(DTYPES),
    )  # fmt: skip
    def new(self, heads: int, dim: int, window: int, sinks: int, chunk: int, rollback: int, both: bool, dtype: str) -> None:
        """Usually a chunk excludes sinks and the window is no shorter than the chunk, as in known models."""
        if chunk and not both:
            sinks, window = 0, max(window, chunk)
        sizes = {"window": window, "sinks": sinks, "chunk": chunk, "rollback": rollback}
        group = group_of(self.format_for(self.family, "dtype", dtype) or "")
        self.make(num_kv_heads=heads, head_dim=dim if group == 1 else group, dtype=dtype, **sizes)
        if self.objects:
            self.shape = self.config["num_kv_heads"], self.config["head_dim"]

    @property
    def model(self) -> Windowed:
        found = self.witness.models[self.objects[0]]
        assert isinstance(found, Windowed)
        return found

    def query(self, count: int, group: int) -> Any:
        return self.source.rows((count, self.shape[0] * group, self.shape[1]), "uneven")

    @precondition(lambda self: self.objects)
    @rule(count=COUNT, group=GROUP, kind=kinds())
    def step(self, count: int, group: int, kind: str) -> None:
        keys, values = pair(self.source, (count, *self.shape), kind)
        self.call("step", self.objects[0], query=self.query(count, group), keys=keys, values=values, scale=0.5)

    @precondition(lambda self: self.objects)
    @rule(count=COUNT | st.integers(6, 16), group=GROUP)
    def step_far(self, count: int, group: int) -> None:
        self.step(count, group, "uneven")

    @precondition(lambda self: self.objects)
    @rule(count=COUNT | st.integers(6, 16), kind=kinds())
    def append(self, count: int, kind: str) -> None:
        keys, values = pair(self.source, (count, *self.shape), kind)
        self.call("append", self.objects[0], keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(wrong=st.integers(0, 5), side=st.integers(0, 2))
    def append_wrongly(self, wrong: int, side: int) -> None:
        keys, values = self.source.wrong_pair((2, *self.shape), wrong, side)
        self.call("append", self.objects[0], keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(more=st.sampled_from((1, -1)))
    def step_with_queries_of_other_tokens(self, more: int) -> None:
        keys, values = pair(self.source, (2, *self.shape), "counting")
        self.call("step", self.objects[0], query=self.query(2 + more, 1), keys=keys, values=values, scale=0.5)

    @precondition(lambda self: self.objects)
    @rule(count=st.integers(1, 3), group=GROUP)
    def attend(self, count: int, group: int) -> None:
        self.call("attend", self.objects[0], query=self.query(count, group), scale=0.5)

    @precondition(lambda self: self.objects)
    @rule(back=st.lists(st.integers(0, 12), min_size=1, max_size=3))
    def read(self, back: list[int]) -> None:
        """back: distances from the end; 0 is the position after the newest token."""
        self.call("read", self.objects[0], positions=[len(self.model.tokens) - each for each in back])

    @precondition(lambda self: self.objects)
    @rule(back=BACK, count=COUNT, group=GROUP, looks=st.booleans())
    def truncate(self, back: int, count: int, group: int, looks: bool) -> None:
        """Truncates, then steps with tokens that replace the removed ones."""
        self.call("truncate", self.objects[0], length=len(self.model.tokens) - back)
        if looks:
            self.attend(count, group)
        self.step(count, group, "uneven")

    @precondition(lambda self: self.objects)
    @rule(count=COUNT, group=GROUP)
    def clear(self, count: int, group: int) -> None:
        self.call("clear", self.objects[0])
        self.step(count, group, "uneven")
