"""The states of the contiguous cache that random call sequences should reach, because bugs depend on them."""

from kvref_conformance.searching.states import NOTES, Call, refusals, state

refusals(
    "contiguous", "ShapeMismatch", "DtypeMismatch", "CapacityExceeded", "PositionOutOfRange", "RowOutOfRange",
)  # fmt: skip


def total(call: Call) -> int:
    """Returns the number of tokens after an append."""
    return len(call.model.tokens) + call.tokens


@state("contiguous", "append", "append_fused")
def tokens_are_there_when_memory_grows(call: Call) -> bool:
    return len(call.model.tokens) > 0 and call.model.room < total(call)


@state("contiguous", "append", "append_fused")
def memory_doubles_more_than_once(call: Call) -> bool:
    return bool(total(call) > 2 * max(1, call.model.room))


@state("contiguous", "append", "append_fused")
def growth_ends_at_a_maximum_that_no_doubling_meets(call: Call) -> bool:
    room = max(1, call.model.room)
    while room < total(call):
        room *= 2
    return bool(call.model.room < total(call) and room > call.model.most)


@state("contiguous", "append", "append_fused")
def memory_grows_after_a_reset(call: Call) -> bool:
    return call.on in call.past.most and total(call) > call.model.room


@state("contiguous", "append", "append_fused")
def the_last_room_there_may_be_is_filled(call: Call) -> bool:
    return call.tokens > 0 and total(call) == call.model.most


@state("contiguous", "append", "append_fused", raising="CapacityExceeded")
def a_cache_with_tokens_and_room_cannot_take_all_that_come(call: Call) -> bool:
    return bool(0 < len(call.model.tokens) < call.model.most)


@state("contiguous", "append", "append_fused")
def tokens_come_after_some_did_not_fit(call: Call) -> bool:
    return call.tokens > 0 and "a cache with tokens and room cannot take all that come" in call.past.met


@state("contiguous", "append", "append_fused")
def fewer_tokens_follow_a_reset(call: Call) -> bool:
    return 0 < total(call) < call.past.most.get(call.on, 0)


@state("contiguous", "append", "append_fused")
def several_tokens_of_a_batch_are_added_to_some(call: Call) -> bool:
    return call.model.sizes[0] > 1 and call.tokens > 1 and len(call.model.tokens) > 0


@state("contiguous", "append_fused")
def several_fused_tokens_are_added_to_some(call: Call) -> bool:
    return call.tokens > 1 and len(call.model.tokens) > 0


@state("contiguous", "advance")
def tokens_are_there_when_more_are_counted(call: Call) -> bool:
    return bool(call.args["count"] and call.model.tokens)


@state("contiguous", "advance")
def memory_is_counted_to_its_end(call: Call) -> bool:
    return bool(call.args["count"] and len(call.model.tokens) + call.args["count"] == call.model.room)


@state("contiguous", "advance", raising="CapacityExceeded")
def more_is_counted_than_memory_holds_and_less_than_it_may(call: Call) -> bool:
    return bool(call.model.room < len(call.model.tokens) + call.args["count"] <= call.model.most)


@state("contiguous", "append", "append_fused")
def tokens_follow_some_that_were_only_counted(call: Call) -> bool:
    return call.tokens > 0 and None in call.model.tokens


@state("contiguous", "truncate")
def some_tokens_go_and_some_stay(call: Call) -> bool:
    return bool(0 < call.args["length"] < len(call.model.tokens))


@state("contiguous", "append", "append_fused")
def tokens_follow_a_truncate_of_some(call: Call) -> bool:
    return bool(call.tokens and call.model.tokens and call.model.last == "truncate")


@state("contiguous", "append", "append_fused")
def memory_grows_after_a_truncate(call: Call) -> bool:
    return bool(call.model.last == "truncate" and total(call) > call.model.room)


@state("contiguous", "reorder")
def rows_with_tokens_change_places(call: Call) -> bool:
    rows = call.args["rows"]
    return bool(call.model.tokens and sorted(rows) == list(range(call.model.sizes[0])) != rows)


@state("contiguous", "reorder")
def a_row_with_tokens_is_there_twice(call: Call) -> bool:
    return bool(call.model.tokens and len(set(call.args["rows"])) < len(call.args["rows"]))


@state("contiguous", "reorder")
def a_batch_with_tokens_grows(call: Call) -> bool:
    return bool(call.model.tokens and len(call.args["rows"]) > call.model.sizes[0])


@state("contiguous", "reorder")
def a_batch_with_tokens_shrinks(call: Call) -> bool:
    return bool(call.model.tokens and len(call.args["rows"]) < call.model.sizes[0])


@state("contiguous", "append", "append_fused")
def tokens_follow_a_row_that_is_there_twice(call: Call) -> bool:
    return call.tokens > 0 and len(set(call.model.origins)) < len(call.model.origins)


@state("contiguous", "read")
def two_caches_hold_tokens(call: Call) -> bool:
    return sum(bool(getattr(model, "tokens", None)) for model in call.models.values()) > 1


def note_contiguous(call: Call) -> None:
    if call.op == "contiguous.reset":
        call.past.most[call.on] = len(call.model.tokens)


NOTES["contiguous"] = note_contiguous
