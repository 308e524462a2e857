"""States of the sharded cache in which bugs are likely."""

from kvref_conformance.families.sharded.model import Sharded
from kvref_conformance.searching.states import NOTES, Call, refusals, state

refusals(
    "sharded", "ShapeMismatch", "DtypeMismatch", "CapacityExceeded", "PositionOutOfRange", "RankOutOfRange", "RankLost",
)  # fmt: skip


def turn(model: Sharded) -> int:
    """Number of tokens in one block of every column."""
    return model.size * model.columns


def reached(call: Call) -> set[int]:
    """The columns that an append writes tokens to."""
    model: Sharded = call.model
    length = len(model.tokens)
    return {at // model.size % model.columns for at in range(length, length + call.tokens)}


@state("sharded", "append")
def an_append_begins_and_ends_inside_blocks_of_different_columns(call: Call) -> bool:
    model: Sharded = call.model
    length, end = len(model.tokens), len(model.tokens) + call.tokens
    return bool(length % model.size and end % model.size and len(reached(call)) > 1)


@state("sharded", "append")
def an_append_comes_round_to_the_column_where_it_began(call: Call) -> bool:
    return bool(call.model.columns > 1 and call.tokens > turn(call.model))


@state("sharded", "append")
def an_append_brings_nothing_to_some_column(call: Call) -> bool:
    return bool(0 < len(reached(call)) < call.model.columns)


@state("sharded", "append")
def a_copy_of_a_head_is_written_to_what_it_holds(call: Call) -> bool:
    return bool(call.model.rows > call.model.row[0] and call.tokens and call.model.tokens)


@state("sharded", "append")
def copies_of_heads_lie_in_several_columns(call: Call) -> bool:
    return bool(a_copy_of_a_head_is_written_to_what_it_holds(call) and call.model.columns > 1)


@state("sharded", "append")
def it_is_filled_to_the_last_token(call: Call) -> bool:
    model: Sharded = call.model
    return bool(call.tokens and model.tokens) and len(model.tokens) + call.tokens == model.blocks * turn(model)


@state("sharded", "append", raising="CapacityExceeded")
def some_of_the_tokens_would_fit(call: Call) -> bool:
    return bool(0 < len(call.model.tokens) < call.model.blocks * turn(call.model))


@state("sharded", "truncate")
def some_blocks_go_and_some_stay(call: Call) -> bool:
    model: Sharded = call.model
    return bool(0 < -(-call.args["length"] // turn(model)) < model.entries)


@state("sharded", "truncate")
def tokens_go_from_some_column_only(call: Call) -> bool:
    model: Sharded = call.model
    gone = {at // model.size % model.columns for at in range(call.args["length"], len(model.tokens))}
    return bool(0 < len(gone) < model.columns)


@state("sharded", "append")
def blocks_are_taken_that_a_truncate_gave_back(call: Call) -> bool:
    model: Sharded = call.model
    more = -(-(len(model.tokens) + call.tokens) // turn(model)) > model.entries
    return bool(more and model.last == "truncate" and "some blocks go and some stay" in call.past.met)


@state("sharded", "append")
def fewer_tokens_are_appended_after_a_clear(call: Call) -> bool:
    return not call.model.tokens and 0 < call.tokens < call.past.most.get(call.on, 0)


@state("sharded", "attend")
def a_column_without_tokens_is_attended_to(call: Call) -> bool:
    model: Sharded = call.model
    return bool(len(call.args["query"]) and len(model.tokens) <= model.size * (model.columns - 1))


@state("sharded", "attend")
def queries_in_different_columns_see_different_tokens(call: Call) -> bool:
    model: Sharded = call.model
    count = len(call.args["query"])
    return bool(model.columns > 1 and count > model.size and len(model.tokens) > count)


@state("sharded", "attend")
def copies_divide_the_query_heads_of_one(call: Call) -> bool:
    model: Sharded = call.model
    return bool(model.rows > model.row[0] and model.tokens and call.args["query"].shape[1] > model.row[0])


@state("sharded", "attend")
def some_copy_has_no_query_head_to_answer(call: Call) -> bool:
    model: Sharded = call.model
    return bool(model.tokens and len(call.args["query"]) and model.rows > call.args["query"].shape[1])


@state("sharded", "append", raising="RankLost")
def a_rank_is_lost_in_an_append_to_what_is_there(call: Call) -> bool:
    return bool(call.model.failing and call.model.tokens)


@state("sharded", "append", raising="RankLost")
def a_rank_is_lost_in_an_append_that_takes_a_block(call: Call) -> bool:
    model: Sharded = call.model
    return bool(model.failing) and -(-(len(model.tokens) + call.tokens) // turn(model)) > model.entries


@state("sharded", "append", raising="RankLost")
def a_rank_is_lost_that_the_tokens_do_not_come_to(call: Call) -> bool:
    return any(rank % call.model.columns not in reached(call) for rank in call.model.failing)


@state("sharded", "read_rank")
def a_rank_that_is_left_is_read(call: Call) -> bool:
    return bool(call.model.lost and call.model.tokens)


def note_sharded(call: Call) -> None:
    if call.op == "sharded.clear" and call.model.tokens:
        call.past.most[call.on] = len(call.model.tokens)


NOTES["sharded"] = note_sharded
