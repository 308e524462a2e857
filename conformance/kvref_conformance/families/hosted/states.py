"""States of blocks and host blocks in which bugs are likely."""

from kvref_conformance.families.hosted.model import Block, Hosted
from kvref_conformance.searching.states import Call, refusals, state

refusals("hosted", "SlotOutOfRange", "ShapeMismatch", "DtypeMismatch")


def sources(call: Call) -> list[Block | None]:
    """The blocks that a call copies."""
    model: Hosted = call.model
    if call.op == "hosted.to_host":
        return [model.blocks[number] for number in call.args["blocks"]]
    return [model.places[number] for number in call.args["places"]]


@state("hosted", "to_host")
def a_block_goes_where_another_lay(call: Call) -> bool:
    return any(call.model.places[place] and block for place, block in zip(call.args["places"], sources(call), strict=True))


@state("hosted", "to_device")
def a_block_comes_back_to_where_another_lies(call: Call) -> bool:
    model: Hosted = call.model
    pairs = zip(call.args["blocks"], sources(call), strict=True)
    return any(held and model.blocks[block] is not held and model.blocks[block] for block, held in pairs)


@state("hosted", "to_device")
def what_comes_back_lies_nowhere_else(call: Call) -> bool:
    return any(held and all(held is not block for block in call.model.blocks) for held in sources(call))


@state("hosted", "to_host", "to_device")
def several_are_copied_in_another_order(call: Call) -> bool:
    places, blocks = call.args["places"], call.args["blocks"]
    return len(places) > 1 and all(sources(call)) and sorted(blocks) != blocks and sorted(places) == places


@state("hosted", "write")
def a_block_is_written_over_that_lies_on_the_host(call: Call) -> bool:
    held = call.model.blocks[call.args["block"]]
    return held is not None and any(held is place for place in call.model.places)
