"""State machine of the family `tiered`: random call sequences."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.checking.setup import takes
from kvref_conformance.families.tiered.model import Tiered
from kvref_conformance.oracle.formats import group_of
from kvref_conformance.searching.machine import BACK, COUNT, Machine, pair
from kvref_conformance.searching.rows import kinds

SIZE = st.integers(1, 3)
WARM = ("q8", "int8", "q8_0", "int8_hadamard")
STORE = ("q8", "q4", "int8", "float8_e5m2", "uint4_g32_float16", "q8_0_hadamard", "float8_e4m3fn_static")
POLICIES = {
    "tail_length": st.integers(0, 4),
    "warm_length": st.integers(0, 2),
    "tail_dtype": st.sampled_from(("float32", "float16", "bfloat16", "int8")),
    "warm_format": st.sampled_from(("q8", "int8", "float16", "mxfp4")),
    "store_format": st.sampled_from(("q4", "q8", "float8_e4m3fn", "float32", "q4_1", "q4_0_hadamard")),
}


class TieredMachine(Machine):
    family = "tiered"

    @initialize(
        heads=SIZE, dim=SIZE, most=st.sampled_from((3, 7, 9, 5, 1)), tail=st.sampled_from((1, 2, 3, 0, 9, 0)),
        warm=st.sampled_from((0, 1, 2, 0, 3)),
        tail_dtype=st.sampled_from(("float32", "float16", "bfloat16")), warm_format=st.sampled_from(WARM),
        store_format=st.sampled_from(STORE),
        batch=st.sampled_from((1, 3, 100)),
    )  # fmt: skip
    def new(
        self, heads: int, dim: int, most: int, tail: int, warm: int, tail_dtype: str, warm_format: str, store_format: str,
        batch: int,
    ) -> None:  # fmt: skip
        tail = min(tail, most)
        formats = [
            self.format_for(self.family, name, each)
            for name, each in (("warm_format", warm_format), ("store_format", store_format))
        ]
        dim = max(dim, *(group_of(each or "") for each in formats))
        self.make(
            num_kv_heads=heads, head_dim=dim, max_tokens=most, tail_length=tail, tail_dtype=tail_dtype,
            warm_length=min(warm, most - tail), warm_format=warm_format, store_format=store_format, migration_batch=batch,
        )  # fmt: skip
        if self.objects:
            self.shape = self.config["num_kv_heads"], self.config["head_dim"]

    @precondition(lambda self: self.objects)
    @rule(count=COUNT | COUNT | st.integers(6, 16), kind=kinds())
    def append(self, count: int, kind: str) -> None:
        keys, values = pair(self.source, (count, *self.shape), kind)
        self.call("append", self.objects[0], keys=keys, values=values)

    append_more = append

    @precondition(lambda self: self.objects)
    @rule(wrong=st.integers(0, 5), side=st.integers(0, 2))
    def append_wrongly(self, wrong: int, side: int) -> None:
        keys, values = self.source.wrong_pair((2, *self.shape), wrong, side)
        self.call("append", self.objects[0], keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(
        data=st.data(),
        names=st.lists(st.sampled_from((*POLICIES, "tail_length", "warm_length", "store_format")), min_size=1, max_size=2),
    )
    def update_policy(self, data: Any, names: list[str]) -> None:
        changes = {name: data.draw(POLICIES[name]) for name in names}
        if all(takes(self.subject, name, value) for name, value in changes.items()):
            self.call("update_policy", self.objects[0], **changes)
            self.append(1, "counting")

    @precondition(lambda self: self.objects)
    @rule(back=BACK, longer=st.sampled_from((0, 3, 0, 1)), count=COUNT, kind=kinds())
    def truncate(self, back: int, longer: int, count: int, kind: str) -> None:
        """longer: tokens by which the tail grows first, while the store has a token, so that `truncate` can remove tokens
        whose append migrated no other token.
        """
        model = self.witness.models[self.objects[0]]
        assert isinstance(model, Tiered)
        tail, warm, most = (model.policy[name] for name in ("tail_length", "warm_length", "max_tokens"))
        longer = min(longer, most - warm - tail - 1)
        if tail and longer > 0 and takes(self.subject, "tail_length", tail + longer):
            self.call("clear", self.objects[0])
            self.append(tail + warm + 1, kind)
            self.call("update_policy", self.objects[0], tail_length=tail + longer)
            self.append(longer, kind)
        self.call("truncate", self.objects[0], length=model.tiers.appended - back)
        self.append(count, kind)

    @precondition(lambda self: self.objects)
    @rule(count=COUNT, kind=kinds())
    def clear(self, count: int, kind: str) -> None:
        self.call("clear", self.objects[0])
        self.append(count, kind)

    @precondition(lambda self: self.objects)
    @rule(group=st.integers(1, 2), kind=kinds(everything=False))
    def attend(self, group: int, kind: str) -> None:
        query = self.source.rows((1, self.shape[0] * group, self.shape[1]), kind)
        self.call("attend", self.objects[0], query=query, scale=0.5)
