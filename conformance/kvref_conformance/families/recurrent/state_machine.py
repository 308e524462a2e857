"""The state machine of the family `recurrent`, and the states that it should reach."""

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.fuzz.base_machine import TOKEN_COUNT, FamilyStateMachine, make_pair
from kvref_conformance.fuzz.row_generators import row_kinds
from kvref_conformance.fuzz.state_registry import ModelCall, register_error_states, state


class RecurrentStateMachine(FamilyStateMachine):
    family = "recurrent"

    @initialize(heads=st.integers(1, 2), dim=st.sampled_from((1, 3)), most=st.sampled_from((1, 4, 9, 30)))
    def new(self, heads: int, dim: int, most: int) -> None:
        self.make_object(num_kv_heads=heads, head_dim=dim, max_tokens=most)

    @property
    def row(self) -> tuple[int, int]:
        return self.config["num_kv_heads"], self.config["head_dim"]

    @precondition(lambda self: self.objects)
    @rule(count=TOKEN_COUNT, kind=row_kinds())
    def append(self, count: int, kind: str) -> None:
        keys, values = make_pair(self.source, (count, *self.row), kind)
        self.call("append", self.objects[0], keys=keys, values=values)

    append_more = append  # a second rule makes appends more frequent

    @precondition(lambda self: self.objects)
    @rule(wrong=st.integers(0, 5), side=st.integers(0, 2))
    def append_wrong_arrays(self, wrong: int, side: int) -> None:
        keys, values = self.source.wrong_pair((2, *self.row), wrong, side)
        self.call("append", self.objects[0], keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule()
    def clear(self) -> None:
        self.call("clear", self.objects[0])


register_error_states("recurrent", "ShapeMismatch", "DtypeMismatch", "CapacityExceeded")


@state("recurrent", "append")
def append_fills_the_cache(call: ModelCall) -> bool:
    return bool(call.tokens) and len(call.model.tokens) + call.tokens == call.model.most
