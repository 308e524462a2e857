"""The states of the paged cache that random call sequences should reach, because bugs depend on them."""

from collections import Counter

from kvref_conformance.families.paged import states_sharing  # noqa: F401 - registers the states of sharing
from kvref_conformance.families.paged.model import Paged
from kvref_conformance.searching.states import NOTES, Call, refusals, state

refusals(
    "paged", "SequenceNotFound", "LayerOutOfRange", "PositionOutOfRange", "ShapeMismatch", "DtypeMismatch", "OutOfBlocks",
)  # fmt: skip


def lengths(call: Call, sequence: int | None = None) -> list[int]:
    """Returns the length of each layer of a sequence."""
    model: Paged = call.model
    return [len(layer.tokens) for layer in model.sequences[call.args["sequence"] if sequence is None else sequence]]


def writing(call: Call) -> tuple[int, int, int, int]:
    """Returns the start and end of a write, the length before it, and the block size."""
    start = call.args["start"]
    return start, start + call.tokens, lengths(call)[call.args["layer"]], call.model.size


def takes(call: Call) -> bool:
    """Returns whether a write or ensure_capacity allocates blocks."""
    end = call.args["num_tokens"] if call.op == "paged.ensure_capacity" else writing(call)[1]
    return bool(-(-end // call.model.size) > call.model.blocks[call.args["sequence"]])


@state("paged", "drop")
def a_dropped_sequence_has_a_partly_filled_last_block(call: Call) -> bool:
    return any(length % call.model.size for length in lengths(call))


@state("paged", "drop")
def a_dropped_sequence_has_several_blocks_a_layer(call: Call) -> bool:
    return bool(max(lengths(call)) > call.model.size)


@state("paged", "drop")
def a_dropped_sequence_has_layers_of_different_length(call: Call) -> bool:
    return len(set(lengths(call))) > 1


@state("paged", "drop")
def a_dropped_sequence_holds_more_blocks_than_it_filled(call: Call) -> bool:
    filled = -(-max(lengths(call)) // call.model.size)
    return bool(0 < filled < call.model.blocks[call.args["sequence"]])


@state("paged", "drop")
def a_drop_leaves_another_sequence_with_tokens(call: Call) -> bool:
    others = set(call.model.sequences) - {call.args["sequence"]}
    return bool(any(lengths(call)) and any(any(lengths(call, other)) for other in others))


@state("paged", "write", "append", "append_step", "drop", "ensure_capacity", "read", "slot_mapping", raising="SequenceNotFound")
def a_dropped_sequence_is_used_again(call: Call) -> bool:
    named = call.args["sequences"] if "sequences" in call.args else [call.args["sequence"]]
    return any(each in call.model.ids and each not in call.model.sequences for each in named)


def reused(call: Call) -> tuple[list[int], int]:
    """Returns the blocks of the gathered tokens, and the number of tokens."""
    sequence, layer = call.args["sequence"], call.args["layer"]
    length = len(call.model.sequences[sequence][layer].tokens)
    return (call.model.table(sequence, layer) or [])[: -(-length // call.model.size)], length


@state("paged", "gather")
def a_block_of_a_dropped_sequence_is_read_by_another(call: Call) -> bool:
    return not call.past.given_back.isdisjoint(reused(call)[0])


@state("paged", "gather")
def a_reused_block_is_partly_filled(call: Call) -> bool:
    table, length = reused(call)
    return bool(length % call.model.size) and table[-1:] != [] and table[-1] in call.past.given_back


@state("paged", "write")
def tokens_are_overwritten_inside_a_partly_filled_block(call: Call) -> bool:
    start, end, length, size = writing(call)
    return start < end <= length and bool(length % size) and start // size == length // size


@state("paged", "write")
def tokens_are_overwritten_across_a_block_border(call: Call) -> bool:
    start, end, length, size = writing(call)
    return start < end <= length and start // size < (end - 1) // size


@state("paged", "write")
def a_write_overwrites_tokens_and_goes_past_the_end(call: Call) -> bool:
    start, end, length, _ = writing(call)
    return start < length < end


@state("paged", "write")
def a_write_starts_in_a_partly_filled_block_and_ends_in_another(call: Call) -> bool:
    start, end, length, size = writing(call)
    return start == length and bool(length % size) and (end - 1) // size > length // size


@state("paged", "write")
def a_write_fills_a_block_that_was_begun(call: Call) -> bool:
    start, end, length, size = writing(call)
    return start == length < end and bool(length % size) and end % size == 0


@state("paged", "write")
def tokens_are_written_into_a_block_that_was_reserved(call: Call) -> bool:
    _, end, length, size = writing(call)
    return end > length and -(-length // size) < -(-end // size) <= call.model.blocks[call.args["sequence"]]


@state("paged", "write", raising="OutOfBlocks")
def a_sequence_with_tokens_runs_out_of_blocks_while_some_are_free(call: Call) -> bool:
    return bool(call.model.free and any(lengths(call)))


@state("paged", "append", "append_step", raising="OutOfBlocks")
def a_batch_runs_out_of_blocks_while_some_are_free(call: Call) -> bool:
    return bool(call.model.free and len(call.args["sequences"]) > 1)


@state("paged", "write", "append", "append_step")
def tokens_come_after_blocks_ran_out(call: Call) -> bool:
    return call.tokens > 0 and any("runs out of blocks" in name for name in call.past.met)


@state("paged", "write", "ensure_capacity")
def sequences_take_blocks_in_turn(call: Call) -> bool:
    sequence, takers = call.args["sequence"], call.past.takers
    return takes(call) and sequence in takers and takers[-1] != sequence


@state("paged", "num_free_blocks")
def every_block_is_in_use(call: Call) -> bool:
    return bool(call.model.total and not call.model.free)


@state("paged", "gather")
def layers_have_tokens_and_different_lengths(call: Call) -> bool:
    return min(lengths(call)) > 0 and len(set(lengths(call))) > 1


@state("paged", "append", "append_step")
def a_batch_names_a_sequence_twice(call: Call) -> bool:
    return len(set(call.args["sequences"])) < len(call.args["sequences"])


@state("paged", "append", "append_step")
def a_batch_names_a_sequence_three_times(call: Call) -> bool:
    return max(Counter(call.args["sequences"]).values(), default=0) == 3


@state("paged", "append", "append_step")
def a_batch_names_two_sequences_twice(call: Call) -> bool:
    return list(Counter(call.args["sequences"]).values()) == [2, 2]


@state("paged", "append", "append_step")
def a_batch_has_sequences_of_different_length(call: Call) -> bool:
    return len({tuple(lengths(call, sequence)) for sequence in call.args["sequences"]}) > 1


@state("paged", "append_step")
def a_step_goes_to_layers_of_different_length(call: Call) -> bool:
    return any(len(set(lengths(call, sequence))) > 1 for sequence in call.args["sequences"])


@state("paged", "append", "append_step")
def a_batch_takes_a_block_for_some_of_its_sequences(call: Call) -> bool:
    layers = slice(call.args["layer"], call.args["layer"] + 1) if "layer" in call.args else slice(None)
    size, blocks = call.model.size, call.model.blocks
    more = {max(lengths(call, sequence)[layers]) // size >= blocks[sequence] for sequence in call.args["sequences"]}
    return len(more) > 1


@state("paged", "gather_batch")
def sequences_of_different_length_are_read_as_a_batch(call: Call) -> bool:
    return len({lengths(call, sequence)[call.args["layer"]] for sequence in call.args["sequences"]} - {0}) > 1


@state("paged", "gather_batch")
def an_empty_sequence_is_read_in_a_batch_with_tokens(call: Call) -> bool:
    counts = [lengths(call, sequence)[call.args["layer"]] for sequence in call.args["sequences"]]
    return min(counts, default=0) == 0 < max(counts, default=0)


@state("paged", "read")
def tokens_of_several_blocks_are_read_out_of_order(call: Call) -> bool:
    positions, size = call.args["positions"], call.model.size
    return positions != sorted(positions) and len({position // size for position in positions}) > 1


@state("paged", "attend")
def attention_goes_over_several_blocks(call: Call) -> bool:
    return bool(lengths(call)[call.args["layer"]] > call.model.size)


def note_paged(call: Call) -> None:
    if call.raised:
        return
    if call.op == "paged.drop":
        sequence = call.args["sequence"]
        for number, layer in enumerate(call.model.sequences[sequence]):
            table = call.model.table(sequence, number) or []
            call.past.given_back |= {*table[: -(-len(layer.tokens) // call.model.size)]}
    elif call.op in ("paged.write", "paged.ensure_capacity") and takes(call):
        call.past.takers.append(call.args["sequence"])


NOTES["paged"] = note_paged
