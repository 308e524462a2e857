"""The states of sequences that share blocks that random call sequences should reach, because bugs depend on them."""

from collections.abc import Iterable

from kvref_conformance.families.paged.held import Held, Place
from kvref_conformance.families.paged.model import Paged
from kvref_conformance.searching.states import Call, state

WRITES = "write", "append", "append_step"


def held(call: Call) -> Held:
    model: Paged = call.model
    return model.ways[0]


def places(call: Call) -> list[Place]:
    """Returns the existing table entries that a call writes to."""
    model, args = call.model, call.args
    if call.op == "paged.write":
        start, stop = args["start"], args["start"] + call.tokens
        spans: Iterable[tuple[int, int, int, int]] = [(args["sequence"], args["layer"], start, stop)] if start < stop else []
    else:
        layers = [args["layer"]] if "layer" in args else range(model.layers)
        named = [(sequence, layer) for sequence in args["sequences"] for layer in layers]
        lengths = [len(model.sequences[sequence][layer].tokens) for sequence, layer in named]
        spans = [(*where, length, length + 1) for where, length in zip(named, lengths, strict=True)]
    return [
        (sequence, layer, entry)
        for sequence, layer, start, stop in spans
        for entry in range(start // model.size, -(-stop // model.size))
        if held(call).at((sequence, layer, entry)) is not None
    ]


def copied(call: Call) -> dict[int, list[Place]]:
    return {name: writers for name, (writers, _) in held(call).to_copy(places(call)).items()}


def youngest(call: Call, writers: list[Place]) -> bool:
    """Returns whether the writing sequence is a fork: it was created after another one that lists the block."""
    sequence, layer, entry = writers[0]
    name = held(call).at(writers[0])
    return any(each < sequence and held(call).at((each, layer, entry)) == name for each in call.model.sequences)


@state("paged", "write")
def a_fork_writes_to_a_shared_block(call: Call) -> bool:
    return any(youngest(call, writers) for writers in copied(call).values())


@state("paged", "write")
def a_parent_writes_to_a_shared_block(call: Call) -> bool:
    return any(not youngest(call, writers) for writers in copied(call).values())


@state("paged", "append", "append_step")
def two_sharers_of_a_block_write_to_it_in_one_batch(call: Call) -> bool:
    return any(len(writers) > 1 for writers in copied(call).values())


@state("paged", "fork")
def a_fork_is_forked(call: Call) -> bool:
    return bool(call.model.kin[call.args["sequence"]] != call.args["sequence"])


@state("paged", "fork")
def an_empty_sequence_is_forked(call: Call) -> bool:
    return not any(layer.tokens for layer in call.model.sequences[call.args["sequence"]])


@state("paged", "fork")
def a_sequence_with_a_partly_filled_block_is_forked(call: Call) -> bool:
    return any(len(layer.tokens) % call.model.size for layer in call.model.sequences[call.args["sequence"]])


def shares(call: Call) -> bool:
    """Returns whether the sequence of a call shares a block."""
    listed = held(call).references()
    return any(listed[name] > 1 for entry in held(call).tables[call.args["sequence"]] for name in entry)


@state("paged", "drop")
def one_of_several_sharers_goes(call: Call) -> bool:
    return shares(call)


@state("paged", "drop")
def the_last_sharer_goes(call: Call) -> bool:
    model, sequence = call.model, call.args["sequence"]
    alone = not any(each != sequence and model.kin[each] == model.kin[sequence] for each in model.sequences)
    return alone and list(model.kin.values()).count(model.kin[sequence]) > 1 and not shares(call)


@state("paged", *WRITES, raising="OutOfBlocks")
def there_is_no_room_for_a_copy(call: Call) -> bool:
    return bool(copied(call))


@state("paged", *WRITES, raising="OutOfBlocks")
def there_is_no_room_for_all_copies_while_blocks_are_free(call: Call) -> bool:
    return bool(copied(call)) and call.model.free > 0


@state("paged", "truncate")
def a_sequence_is_cut_inside_a_block_that_it_shares(call: Call) -> bool:
    length = call.args["length"]
    return shares(call) and length % call.model.size != 0


@state("paged", "truncate")
def a_sequence_with_tokens_is_cut_to_nothing(call: Call) -> bool:
    return call.args["length"] == 0 and bool(held(call).tables[call.args["sequence"]])
