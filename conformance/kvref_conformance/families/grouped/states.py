"""The states of the grouped cache that random call sequences should reach, because bugs depend on them."""

from kvref_conformance.families.grouped.model import Grouped
from kvref_conformance.searching.states import Call, refusals, state

refusals(
    "grouped", "ShapeMismatch", "DtypeMismatch", "OutOfBlocks", "SequenceNotFound", "LayerOutOfRange", "PositionOutOfRange",
    "NotTruncatable", "TokenOutOfRange", "TokenMismatch", "InUse",
)  # fmt: skip


def gone(model: Grouped, sequence: int) -> bool:
    """Returns whether a group of the sequence has freed blocks."""
    return any(name is None for entry in model.held.tables.get(sequence, []) for name in entry)


def stepped(call: Call) -> tuple[Grouped, int, int, int]:
    """Returns the model before a step, the sequence, its length, and the number of tokens of the step."""
    model: Grouped = call.model
    sequence = call.args["sequence"]
    return model, sequence, model.lengths[sequence], len(call.args["keys"][0])


@state("grouped", "step")
def a_window_gives_a_block_back(call: Call) -> bool:
    model, sequence, length, count = stepped(call)
    return count > 0 and bool(model.held.unseen(sequence, length))


@state("grouped", "step")
def a_window_gives_several_blocks_back(call: Call) -> bool:
    model, sequence, length, count = stepped(call)
    return count > 0 and len(model.held.unseen(sequence, length)) > model.groups


@state("grouped", "step")
def a_step_is_longer_than_the_window(call: Call) -> bool:
    model, _, _, count = stepped(call)
    window = model.held.windows[0]
    return window is not None and count > window


@state("grouped", "step")
def what_a_step_gives_back_is_the_room_for_it(call: Call) -> bool:
    model, sequence, length, count = stepped(call)
    return count > 0 and model.held.needed(sequence, length, count) > model.held.total - model.held.used()


@state("grouped", "step", raising="OutOfBlocks")
def there_is_room_in_some_groups(call: Call) -> bool:
    model: Grouped = call.model
    return call.args["sequence"] in model.lengths and model.held.total > model.held.used() and model.groups > 1


@state("grouped", "step", raising="OutOfBlocks")
def a_step_is_refused_that_would_give_blocks_back(call: Call) -> bool:
    model: Grouped = call.model
    sequence = call.args["sequence"]
    return sequence in model.lengths and bool(model.held.unseen(sequence, model.lengths[sequence]))


@state("grouped", "step")
def what_others_hold_is_given_back_by_one(call: Call) -> bool:
    model, sequence, length, count = stepped(call)
    return count > 0 and any(model.held.listed(name) > 1 for name in model.held.unseen(sequence, length))


@state("grouped", "step")
def a_block_is_copied_before_it_is_written_to(call: Call) -> bool:
    model, sequence, length, count = stepped(call)
    return count > 0 and bool(model.held.copied(sequence, length))


@state("grouped", "step")
def what_could_be_found_is_taken(call: Call) -> bool:
    model, sequence, length, count = stepped(call)
    held = model.held
    return count > 0 and held.needed(sequence, length, count) > held.total - held.used() - len(held.waiting)


@state("grouped", "begin")
def a_hit_lies_behind_what_windows_need(call: Call) -> bool:
    model: Grouped = call.model
    blocks, window = model.held.hit(call.args["tokens"], call.args.get("salt", "")), model.held.windows[0]
    return window is not None and blocks * model.size - window + 1 >= model.size


@state("grouped", "begin")
def a_hit_is_shorter_than_the_last_group_finds(call: Call) -> bool:
    model: Grouped = call.model
    tokens, salt = call.args["tokens"], call.args.get("salt", "")
    chain = model.held.chain(tokens[: max(0, len(tokens) - 1)], salt, model.groups - 1)
    return model.held.hit(tokens, salt) < len(chain) and all(key in model.held.found for key in chain)


@state("grouped", "begin")
def a_hit_lies_in_free_blocks(call: Call) -> bool:
    model: Grouped = call.model
    return model.held.hit(call.args["tokens"], call.args.get("salt", "")) > 0 and bool(model.held.waiting)


@state("grouped", "commit")
def what_windows_gave_back_is_committed(call: Call) -> bool:
    model: Grouped = call.model
    sequence = call.args["sequence"]
    known = len(model.told[sequence][1]) // model.size
    fresh = model.held.tables[sequence][known : len(call.args["tokens"]) // model.size]
    return any(name is None for entry in fresh for name in entry)


@state("grouped", "truncate")
def tokens_go_where_windows_passed(call: Call) -> bool:
    model: Grouped = call.model
    sequence = call.args["sequence"]
    return call.args["length"] < model.lengths[sequence] and gone(model, sequence)


@state("grouped", "drop")
def a_sequence_whose_windows_passed_is_dropped(call: Call) -> bool:
    return gone(call.model, call.args["sequence"])


@state("grouped", "fork")
def a_sequence_whose_windows_passed_is_forked(call: Call) -> bool:
    return gone(call.model, call.args["sequence"])


@state("grouped", "attend", raising="PositionOutOfRange")
def a_query_sees_what_was_given_back(call: Call) -> bool:
    model: Grouped = call.model
    return len(call.args["query"]) <= model.lengths[call.args["sequence"]]
