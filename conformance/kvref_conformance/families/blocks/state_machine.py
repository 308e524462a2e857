"""The state machine of the family `blocks`."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.blocks.model import Blocks
from kvref_conformance.fuzz.base_machine import FamilyStateMachine, choose_one
from kvref_conformance.fuzz.state_registry import NOTES, ModelCall, register_error_states, state

INDEX = st.integers(0, 3)


class BlocksStateMachine(FamilyStateMachine):
    family = "blocks"

    @initialize(num_blocks=st.sampled_from((2, 3, 1, 4, 3, 0)))
    def new(self, num_blocks: int) -> None:
        self.make_object(num_blocks=num_blocks)

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        self.edited = self.objects[0]
        return {
            "allocate": lambda number: self.allocate(),
            "allocate_many": lambda number: self.allocate_many(number % 3),
            "free": self.free,
            "share": self.share,
        }

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
        pool = self.models[self.objects[0]]
        assert isinstance(pool, Blocks)
        block = choose_one(pool.references_of, index)
        if block is not None:
            self.call("free", self.objects[0], block=block)

    @precondition(lambda self: self.objects)
    @rule(index=INDEX)
    def share(self, index: int) -> None:
        pool = self.models[self.objects[0]]
        assert isinstance(pool, Blocks)
        block = choose_one(pool.references_of, index)
        if block is not None:
            self.call("share", self.objects[0], block=block)

    @precondition(lambda self: self.objects)
    @rule(block=st.integers(-1, 3), share=st.booleans())
    def take_or_free_anything(self, block: int, share: bool) -> None:
        self.call("share" if share else "free", self.objects[0], block=block)


# The states of the block pool that random call sequences should reach, because bugs depend on them.

register_error_states("blocks", "OutOfBlocks", "BlockNotAllocated")


@state("blocks", "allocate", raising="OutOfBlocks")
def a_pool_with_blocks_is_exhausted(call: ModelCall) -> bool:
    return bool(call.model.total)


@state("blocks", "allocate")
def a_freed_block_is_allocated_again(call: ModelCall) -> bool:
    return call.result in call.history.freed_blocks


@state("blocks", "allocate")
def an_exhausted_pool_allocates_again(call: ModelCall) -> bool:
    return "a pool with blocks is exhausted" in call.history.reached


@state("blocks", "free")
def a_block_is_freed_while_others_are_allocated(call: ModelCall) -> bool:
    return len(call.model.references_of) > 1


@state("blocks", "free")
def the_last_of_several_blocks_is_freed(call: ModelCall) -> bool:
    return len(call.model.references_of) == 1 and bool(call.history.freed_blocks)


@state("blocks", "free", raising="BlockNotAllocated")
def a_block_is_freed_twice(call: ModelCall) -> bool:
    return call.args["block"] in call.history.freed_blocks


@state("blocks", "free", raising="BlockNotAllocated")
def a_negative_block_is_freed_while_others_are_allocated(call: ModelCall) -> bool:
    return call.args["block"] < 0 and bool(call.model.references_of)


@state("blocks", "share")
def a_block_gets_a_third_reference(call: ModelCall) -> bool:
    return bool(call.model.references_of[call.args["block"]] == 2)


@state("blocks", "free")
def a_shared_block_is_freed_once(call: ModelCall) -> bool:
    return bool(call.model.references_of[call.args["block"]] > 1)


@state("blocks", "free")
def the_last_reference_of_a_shared_block_is_freed(call: ModelCall) -> bool:
    return call.model.references_of[call.args["block"]] == 1 and "a shared block is freed once" in call.history.reached


@state("blocks", "share", raising="BlockNotAllocated")
def a_block_that_was_freed_is_shared(call: ModelCall) -> bool:
    return call.args["block"] in call.history.freed_blocks


def note_blocks(call: ModelCall) -> None:
    if call.op == "blocks.free" and not call.error_kind and call.model.references_of[call.args["block"]] == 1:
        call.history.freed_blocks.add(call.args["block"])


NOTES["blocks"] = note_blocks
