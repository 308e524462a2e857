"""The state machine of the family `blocks`."""

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.blocks.model import Blocks
from kvref_conformance.searching.machine import Machine, one_of

INDEX = st.integers(0, 3)


class BlocksMachine(Machine):
    family = "blocks"

    @initialize(num_blocks=st.sampled_from((2, 3, 1, 4, 3, 0)))
    def new(self, num_blocks: int) -> None:
        self.make(num_blocks=num_blocks)

    @precondition(lambda self: self.objects)
    @rule()
    def allocate(self) -> None:
        self.call("allocate", self.objects[0])

    @precondition(lambda self: self.objects)
    @rule(count=st.integers(-1, 3))
    def allocate_many(self, count: int) -> None:
        self.call("allocate_many", self.objects[0], count=count)

    @precondition(lambda self: self.objects)
    @rule(index=INDEX)
    def free(self, index: int) -> None:
        pool = self.witness.models[self.objects[0]]
        assert isinstance(pool, Blocks)
        block = one_of(pool.held, index)
        if block is not None:
            self.call("free", self.objects[0], block=block)

    @precondition(lambda self: self.objects)
    @rule(index=INDEX)
    def share(self, index: int) -> None:
        pool = self.witness.models[self.objects[0]]
        assert isinstance(pool, Blocks)
        block = one_of(pool.held, index)
        if block is not None:
            self.call("share", self.objects[0], block=block)

    @precondition(lambda self: self.objects)
    @rule(block=st.integers(-1, 3), share=st.booleans())
    def take_or_free_anything(self, block: int, share: bool) -> None:
        self.call("share" if share else "free", self.objects[0], block=block)
