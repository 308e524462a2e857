"""The state machine of the family `channels`."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.channels.model import Channels
from kvref_conformance.oracle.formats import group_of
from kvref_conformance.searching.machine import BACK, Machine, pair
from kvref_conformance.searching.rows import HUGE, kinds

COUNT = st.sampled_from((1, 31, 2, 32, 33, 1, 3, 16, 40, 70, 0))  # tokens of an append, for groups of 32
SOME = ("uint4_g32_float16", "uint2_g32_float32", "uint8_g32_bfloat16", "uint2_g32_float16")
LOUD = st.sampled_from((1.0, 64.0))


class ChannelsMachine(Machine):
    family = "channels"

    @initialize(
        heads=st.sampled_from((1, 2, 1)), most=st.sampled_from((96, 70, 120, 33)), groups=st.sampled_from((1, 2, 1)),
        rollback=st.sampled_from((0, 3, 0, 40)), format=st.sampled_from(SOME),
        dtype=st.sampled_from(("float32", "float16", "bfloat16")),
    )  # fmt: skip
    def new(self, heads: int, most: int, groups: int, rollback: int, format: str, dtype: str) -> None:
        group = group_of(self.format_for(self.family, "format", format) or "")
        self.make(
            num_kv_heads=heads, head_dim=group, max_tokens=most * group // 32, residual=groups * group, format=format,
            dtype=dtype, rollback=rollback,
        )  # fmt: skip

    @property
    def model(self) -> Channels:
        found = self.witness.models[self.objects[0]]
        assert isinstance(found, Channels)
        return found

    @precondition(lambda self: self.objects)
    @rule(count=COUNT, kind=kinds(), loud=LOUD)
    def append(self, count: int, kind: str, loud: float) -> None:
        """Appends tokens. One channel in eight of the keys is loud."""
        keys, values = pair(self.source, (count, *self.model.row), kind)
        if kind not in HUGE:
            keys[:, :, ::8] = self.source.held(keys[:, :, ::8] * np.float32(loud))
        self.call("append", self.objects[0], keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(beyond=st.sampled_from((-1, 0, 1, 5)), loud=LOUD)
    def append_up_to_a_residual(self, beyond: int, loud: float) -> None:
        """Appends tokens up to the length at which the next keys are quantized, or to one near it."""
        count = self.model.residual - len(self.model) % self.model.residual + beyond
        self.append(count, "uneven", loud)
        if beyond == -1:
            self.append(1, "uneven", loud)

    @precondition(lambda self: self.objects)
    @rule(wrong=st.integers(0, 5), side=st.integers(0, 2))
    def append_wrongly(self, wrong: int, side: int) -> None:
        keys, values = self.source.wrong_pair((2, *self.model.row), wrong, side)
        self.call("append", self.objects[0], keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(back=st.lists(st.integers(0, 70), min_size=1, max_size=3))
    def read(self, back: list[int]) -> None:
        """back: distances from the end; 0 is the position after the newest token."""
        self.ask("read", self.objects[0], positions=[len(self.model) - each for each in back])

    @precondition(lambda self: self.objects)
    @rule(count=st.integers(1, 2), group=st.integers(1, 2), kind=kinds(everything=False))
    def attend(self, count: int, group: int, kind: str) -> None:
        heads, dim = self.model.row
        query = self.source.rows((count, heads * self.subject.size("group_size", group), dim), kind)
        self.call("attend", self.objects[0], query=query, scale=0.5 / dim)

    @precondition(lambda self: self.objects)
    @rule(back=BACK | st.sampled_from((20, 33)), count=COUNT, kind=kinds())
    def truncate(self, back: int, count: int, kind: str) -> None:
        """Truncates, then appends tokens that replace the removed ones."""
        self.call("truncate", self.objects[0], length=len(self.model) - back)
        self.append(count, kind, 1.0)

    @precondition(lambda self: self.objects)
    @rule(count=COUNT, kind=kinds())
    def clear(self, count: int, kind: str) -> None:
        self.call("clear", self.objects[0])
        self.append(count, kind, 1.0)
