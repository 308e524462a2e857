"""The states of the windowed cache that random call sequences should reach, because bugs depend on them."""

from kvref_conformance.searching.states import Call, refusals, state

refusals("windowed", "ShapeMismatch", "DtypeMismatch", "PositionOutOfRange", "NotTruncatable")


def stop(call: Call) -> int:
    """Returns the length after the call."""
    return len(call.model.tokens) + call.tokens


@state("windowed", "step")
def a_step_is_longer_than_the_window(call: Call) -> bool:
    return bool(call.tokens > call.model.window > 1)


@state("windowed", "step")
def a_step_ends_where_the_window_is_full(call: Call) -> bool:
    return bool(stop(call) == call.model.window and 0 < call.tokens < call.model.window)


@state("windowed", "step")
def several_tokens_come_to_a_ring_that_is_full(call: Call) -> bool:
    return bool(len(call.model.tokens) >= call.model.window > call.tokens > 1)


@state("windowed", "step")
def several_tokens_come_across_the_end_of_a_ring(call: Call) -> bool:
    ring = call.model.window + call.model.rollback
    start = len(call.model.tokens) - call.model.sinks
    return bool(start > ring > 1 and start % ring and start % ring + call.tokens > ring)


@state("windowed", "step")
def one_token_comes_long_after_the_window_is_full(call: Call) -> bool:
    return bool(len(call.model.tokens) > 2 * call.model.window and call.tokens == 1)


@state("windowed", "step")
def a_window_of_one_token_sees_it(call: Call) -> bool:
    return bool(call.model.window == 1 and call.tokens and call.model.tokens)


@state("windowed", "step")
def sinks_are_seen_past_the_window(call: Call) -> bool:
    return bool(call.model.sinks and stop(call) > call.model.window + call.model.sinks and call.tokens)


@state("windowed", "step")
def the_sinks_are_not_all_there_and_some_come(call: Call) -> bool:
    return bool(0 < len(call.model.tokens) < call.model.sinks < stop(call))


@state("windowed", "step")
def a_step_goes_over_the_end_of_a_chunk(call: Call) -> bool:
    chunk = call.model.chunk
    return bool(
        chunk and call.tokens > 1 and len(call.model.tokens) % chunk and len(call.model.tokens) // chunk < stop(call) // chunk
    )


@state("windowed", "step")
def the_first_token_of_a_chunk_comes_alone(call: Call) -> bool:
    return bool(call.model.chunk and call.tokens == 1 and call.model.tokens and len(call.model.tokens) % call.model.chunk == 0)


@state("windowed", "append")
def more_is_appended_than_is_kept(call: Call) -> bool:
    return bool(call.tokens > call.model.window + call.model.rollback and call.model.tokens)


@state("windowed", "truncate")
def a_draft_goes_that_pushed_others_out(call: Call) -> bool:
    back = len(call.model.tokens) - call.args["length"]
    return bool(0 < back <= call.model.rollback and len(call.model.tokens) > call.model.window + back)


@state("windowed", "truncate")
def tokens_go_before_any_left_the_window(call: Call) -> bool:
    return bool(0 < call.args["length"] < len(call.model.tokens) and call.model.kept == 0)


@state("windowed", "step")
def tokens_come_in_the_place_of_some_that_went(call: Call) -> bool:
    return bool(call.model.last == "truncate" and call.model.kept and call.tokens)


@state("windowed", "read", raising="PositionOutOfRange")
def a_token_that_left_the_window_is_read(call: Call) -> bool:
    model = call.model
    return bool(any(model.sinks <= each < model.kept for each in call.args["positions"]))


@state("windowed", "attend")
def the_newest_token_is_looked_from_again(call: Call) -> bool:
    return bool(len(call.model.tokens) > call.model.window and not call.model.looked_back)
