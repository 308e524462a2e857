"""The states of the pooled cache that random call sequences should reach, because bugs depend on them."""

from kvref_conformance.families.pooled.model import Pooled
from kvref_conformance.searching.states import NOTES, Call, refusals, state

refusals("pooled", "ShapeMismatch", "DtypeMismatch", "BufferTooLarge")


def goes(call: Call) -> int:
    """Returns how many blocks the append evicts."""
    model: Pooled = call.model
    return max(0, -(-(len(model.tokens) + call.tokens - model.most) // model.per_block))


@state("pooled", "append")
def a_block_goes_while_the_newest_is_partly_filled(call: Call) -> bool:
    return 0 < goes(call) < call.model.blocks and bool(len(call.model.tokens) % call.model.per_block)


@state("pooled", "append")
def several_blocks_go_and_some_stay(call: Call) -> bool:
    return bool(1 < goes(call) < call.model.blocks)


@state("pooled", "append")
def an_append_lets_go_of_everything_and_of_some_that_came(call: Call) -> bool:
    return bool(call.model.tokens) and goes(call) > call.model.blocks


@state("pooled", "append")
def a_partly_filled_block_is_filled_and_another_opened(call: Call) -> bool:
    model: Pooled = call.model
    partly = len(model.tokens) % model.per_block
    return bool(partly) and partly + call.tokens > model.per_block and not goes(call)


@state("pooled", "append")
def it_is_filled_to_the_last_token(call: Call) -> bool:
    return bool(call.tokens and call.model.tokens) and len(call.model.tokens) + call.tokens == call.model.most


@state("pooled", "append")
def a_block_goes_though_its_size_does_not_divide_the_most(call: Call) -> bool:
    return goes(call) > 0 and bool(call.model.most % call.model.per_block) and bool(call.model.tokens)


@state("pooled", "append")
def a_block_is_opened_in_memory_that_was_given_back(call: Call) -> bool:
    model: Pooled = call.model
    size = model.size
    return bool(size and model.pool.free[size] and model.pool.returns) and call.tokens > model.blocks * model.per_block - len(
        model.tokens
    )


@state("pooled", "append")
def a_block_is_opened_in_memory_that_another_cache_gave_back(call: Call) -> bool:
    return a_block_is_opened_in_memory_that_was_given_back(call) and any(other != call.on for other in call.past.most)


@state("pooled", "read")
def two_caches_of_one_pool_hold_tokens(call: Call) -> bool:
    caches = [each for each in call.models.values() if isinstance(each, Pooled) and each.shared]
    return sum(bool(each.tokens) for each in caches) > 1


@state("pooled", "clear")
def a_partly_filled_block_is_cleared(call: Call) -> bool:
    return bool(len(call.model.tokens) % call.model.per_block)


@state("pooled", "append")
def fewer_tokens_are_appended_after_a_clear(call: Call) -> bool:
    return not call.model.tokens and 0 < call.tokens < call.past.most.get(call.on, 0)


@state("pooled", "clear")
def more_is_given_back_than_the_pool_keeps(call: Call) -> bool:
    model: Pooled = call.model
    return bool(model.size) and model.pool.free[model.size] + 2 * model.blocks > model.pool.most


def note_pooled(call: Call) -> None:
    if call.op == "pooled.clear" and call.model.tokens:
        call.past.most[call.on] = len(call.model.tokens)


NOTES["pooled"] = note_pooled
