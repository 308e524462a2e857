"""The states of the block pool that bugs hide behind."""

from kvref_conformance.searching.states import NOTES, Call, refusals, state

refusals("blocks", "OutOfBlocks", "BlockNotAllocated")


@state("blocks", "allocate", raising="OutOfBlocks")
def a_pool_that_had_blocks_is_empty(call: Call) -> bool:
    return bool(call.model.total)


@state("blocks", "allocate")
def a_block_is_handed_out_again(call: Call) -> bool:
    return call.ok in call.past.given_back


@state("blocks", "allocate")
def a_pool_that_was_empty_gives_again(call: Call) -> bool:
    return "a pool that had blocks is empty" in call.past.met


@state("blocks", "free")
def a_block_is_freed_while_others_are_held(call: Call) -> bool:
    return len(call.model.held) > 1


@state("blocks", "free")
def the_last_of_several_is_freed(call: Call) -> bool:
    return len(call.model.held) == 1 and bool(call.past.given_back)


@state("blocks", "free", raising="BlockNotAllocated")
def a_block_is_freed_twice(call: Call) -> bool:
    return call.args["block"] in call.past.given_back


@state("blocks", "free", raising="BlockNotAllocated")
def a_negative_block_is_freed_while_some_are_held(call: Call) -> bool:
    return call.args["block"] < 0 and bool(call.model.held)


def note_blocks(call: Call) -> None:
    if call.op == "blocks.free" and not call.raised:
        call.past.given_back.add(call.args["block"])


NOTES["blocks"] = note_blocks
