"""The states of the prefix cache that random call sequences should reach, because bugs depend on them."""

from kvref_conformance.families.prefix.model import Prefix
from kvref_conformance.searching.states import Call, refusals, state

refusals("prefix", "TokenOutOfRange", "TokenMismatch", "InUse", "OutOfBlocks", "SequenceNotFound", "PositionOutOfRange")


def asked(call: Call) -> tuple[Prefix, int]:
    """Returns the model before begin, and the number of blocks of the hit."""
    model: Prefix = call.model
    keys = model.chain(call.args["tokens"][:-1], call.args.get("salt", ""))
    return model, max(len(path) for held in model.kept for path, _ in held.paths(keys))


@state("prefix", "begin")
def a_prompt_is_found_in_part(call: Call) -> bool:
    model, hit = asked(call)
    return 0 < hit < (len(call.args["tokens"]) - 1) // model.size


@state("prefix", "begin")
def what_is_found_lies_in_free_blocks(call: Call) -> bool:
    model, hit = asked(call)
    return hit > 0 and any(held.released for held in model.kept)


@state("prefix", "begin", "write", "ensure_capacity")
def a_block_that_could_be_found_is_taken(call: Call) -> bool:
    model: Prefix = call.model
    return bool(model.free) and all(len(held.released) == model.total - held.used() for held in model.kept)


@state("prefix", "begin", raising="OutOfBlocks")
def a_prompt_that_is_found_does_not_fit(call: Call) -> bool:
    return asked(call)[1] > 0


@state("prefix", "write")
def a_block_that_can_be_found_is_written_over(call: Call) -> bool:
    model: Prefix = call.model
    sequence, start = call.args["sequence"], call.args["start"]
    return call.tokens > 0 and start < len(model.told[sequence][1]) // model.size * model.size


@state("prefix", "drop")
def a_sequence_whose_blocks_can_be_found_is_dropped(call: Call) -> bool:
    model: Prefix = call.model
    return len(model.told[call.args["sequence"]][1]) >= model.size


@state("prefix", "commit")
def what_is_committed_is_there_already(call: Call) -> bool:
    model: Prefix = call.model
    salt, told = model.told[call.args["sequence"]]
    more = model.chain(call.args["tokens"], salt)[len(told) // model.size :]
    return any(key in held.found for held in model.kept for key in more)


@state("prefix", "reset")
def something_is_forgotten(call: Call) -> bool:
    return any(held.found for held in call.model.kept)
