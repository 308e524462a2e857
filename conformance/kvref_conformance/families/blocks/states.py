"""The states of the block pool that random call sequences should reach, because bugs depend on them."""

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


@state("blocks", "share")
def a_block_is_shared_by_three(call: Call) -> bool:
    return bool(call.model.held[call.args["block"]] == 2)


@state("blocks", "free")
def a_shared_block_is_freed_by_one(call: Call) -> bool:
    return bool(call.model.held[call.args["block"]] > 1)


@state("blocks", "free")
def a_block_that_was_shared_is_freed_by_the_last(call: Call) -> bool:
    return call.model.held[call.args["block"]] == 1 and "a shared block is freed by one" in call.past.met


@state("blocks", "share", raising="BlockNotAllocated")
def a_block_that_was_freed_is_shared(call: Call) -> bool:
    return call.args["block"] in call.past.given_back


def note_blocks(call: Call) -> None:
    if call.op == "blocks.free" and not call.raised and call.model.held[call.args["block"]] == 1:
        call.past.given_back.add(call.args["block"])


NOTES["blocks"] = note_blocks
