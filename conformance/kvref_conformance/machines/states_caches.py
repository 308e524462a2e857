"""The states of the contiguous, the quantized, the tiered and the pooled cache that bugs hide behind."""

import numpy as np

from kvref_conformance.machines.states import NOTES, Call, refusals, state
from kvref_conformance.oracle.pooled import Pooled
from kvref_conformance.oracle.tiers import Token

refusals("contiguous", "ShapeMismatch", "DtypeMismatch", "CapacityExceeded", "PositionOutOfRange")


def total(call: Call) -> int:
    """Tokens of a contiguous cache after an append."""
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


@state("contiguous", "read")
def two_caches_hold_tokens(call: Call) -> bool:
    return sum(bool(getattr(model, "tokens", None)) for model in call.models.values()) > 1


def note_contiguous(call: Call) -> None:
    if call.op == "contiguous.reset":
        call.past.most[call.on] = len(call.model.tokens)


NOTES["contiguous"] = note_contiguous
refusals(
    "quantized", "LayerOutOfRange", "PositionOutOfRange", "HeadOutOfRange", "ShapeMismatch", "DtypeMismatch", "CapacityExceeded",
    "NonFinite",
)  # fmt: skip


def fill(call: Call) -> list[int]:
    """The length of each layer of a quantized cache."""
    return [len(tokens) for tokens in call.model.tokens]


@state("quantized", "length")
def a_layer_is_full_and_another_is_not(call: Call) -> bool:
    return bool(min(fill(call)) < max(fill(call)) == call.model.room)


@state("quantized", "append_step", raising="CapacityExceeded")
def a_step_meets_a_full_layer_and_one_that_is_not(call: Call) -> bool:
    return bool(min(fill(call)) < call.model.room)


@state("quantized", "append_step")
def a_step_goes_to_layers_of_different_length(call: Call) -> bool:
    return len(set(fill(call))) > 1


@state("quantized", "length")
def every_layer_is_full(call: Call) -> bool:
    return len(fill(call)) > 1 and min(fill(call)) == call.model.room


@state("quantized", "clear")
def layers_of_different_length_are_cleared(call: Call) -> bool:
    return len(set(fill(call))) > 1


@state("quantized", "length")
def fewer_tokens_follow_a_clear(call: Call) -> bool:
    return 0 < sum(fill(call)) < call.past.most.get(call.on, 0)


@state("quantized", "length")
def every_layer_has_tokens_after_a_clear(call: Call) -> bool:
    return call.on in call.past.most and len(fill(call)) > 1 and min(fill(call)) > 0


@state("quantized", "length")
def a_quiet_token_lies_beside_a_loud_one(call: Call) -> bool:
    for tokens in call.model.tokens:
        loudest = [float(np.abs(token[0].values).max()) for token in tokens]
        if loudest and 0 < 50 * min(loudest) < max(loudest):
            return True
    return False


@state("quantized", "read_token")
def a_token_is_read_that_is_neither_the_first_nor_the_last(call: Call) -> bool:
    return bool(0 < call.args["position"] < fill(call)[call.args["layer"]] - 1)


@state("quantized", "read_head")
def a_head_is_read_that_is_not_the_first(call: Call) -> bool:
    return bool(call.args["head"] > 0)


@state("quantized", "read_token")
def a_token_of_a_layer_is_read_that_is_not_the_first(call: Call) -> bool:
    return bool(call.args["layer"] > 0)


@state("quantized", "attend")
def attention_goes_over_several_tokens(call: Call) -> bool:
    return bool(fill(call)[call.args["layer"]] > 1)


def note_quantized(call: Call) -> None:
    if call.op == "quantized.clear" and any(fill(call)):
        call.past.most[call.on] = sum(fill(call))


NOTES["quantized"] = note_quantized
refusals("tiered", "ShapeMismatch", "DtypeMismatch", "NonFinite", "ConfigError", "PositionOutOfRange")
TAIL, WARM, STORE = "tail", "warm", "store"


def tiers(call: Call) -> list[list[Token]]:
    """The tokens of a tiered cache, by tier: newest tier first."""
    tokens = call.model.tiers.tokens
    return [[token for token in tokens if token.tier == tier] for tier in (TAIL, WARM, STORE)]


def evicts(call: Call) -> bool:
    """Whether an append evicts tokens that were there, and leaves some of them."""
    there, most = len(call.model.tiers.tokens), call.model.policy["max_tokens"]
    return there > 0 and call.tokens < most < there + call.tokens


def enters_the_store(call: Call) -> int:
    """Tokens that have ever entered the store, after an append, if the policy never changed."""
    policy = call.model.policy
    return int(call.model.tiers.appended + call.tokens - policy["tail_length"] - policy["warm_length"])


@state("tiered", "append")
def some_tokens_are_evicted(call: Call) -> bool:
    return evicts(call)


@state("tiered", "append")
def some_tokens_are_evicted_while_every_tier_holds_some(call: Call) -> bool:
    return evicts(call) and all(tiers(call))


@state("tiered", "append")
def an_append_is_longer_than_the_cache_and_it_holds_tokens(call: Call) -> bool:
    return bool(call.model.tiers.tokens) and call.tokens > call.model.policy["max_tokens"]


@state("tiered", "append")
def a_cache_with_tokens_is_filled_exactly(call: Call) -> bool:
    there = len(call.model.tiers.tokens)
    return bool(0 < there < call.model.policy["max_tokens"] == there + call.tokens)


@state("tiered", "append")
def the_tail_wraps_around(call: Call) -> bool:
    before, length = call.model.tiers.appended, call.model.policy["tail_length"]
    return bool(length > 1 and 0 < before % length < length < before % length + call.tokens)


@state("tiered", "append")
def the_warm_tier_wraps_around(call: Call) -> bool:
    policy = call.model.policy
    return policy["warm_length"] > 1 and enters_the_store(call) > 0 and bool(tiers(call)[1]) and call.tokens > 0


@state("tiered", "append")
def the_store_wraps_around(call: Call) -> bool:
    return bool(tiers(call)[2]) and enters_the_store(call) > call.model.policy["max_tokens"] > 1


@state("tiered", "append")
def more_moves_on_than_a_batch(call: Call) -> bool:
    overflow = len(tiers(call)[0]) + call.tokens - call.model.policy["tail_length"]
    return bool(tiers(call)[0]) and overflow > call.past.made[call.on]["migration_batch"]


@state("tiered", "append")
def there_is_no_tail(call: Call) -> bool:
    return call.model.policy["tail_length"] == 0 and bool(call.model.tiers.tokens) and call.tokens > 0


@state("tiered", "append")
def there_is_a_warm_tier_and_no_tail(call: Call) -> bool:
    policy = call.model.policy
    return policy["tail_length"] == 0 < policy["warm_length"] and enters_the_store(call) > 0 and call.tokens > 0


@state("tiered", "update_policy")
def the_policy_changes_while_every_tier_holds_tokens(call: Call) -> bool:
    return all(tiers(call))


@state("tiered", "update_policy")
def the_tail_shrinks_below_its_tokens(call: Call) -> bool:
    return bool(len(tiers(call)[0]) > call.args.get("tail_length", 99))


@state("tiered", "update_policy")
def the_tail_grows_while_the_store_holds_tokens(call: Call) -> bool:
    return bool(tiers(call)[2]) and call.args.get("tail_length", 0) > call.model.policy["tail_length"]


@state("tiered", "update_policy")
def the_warm_tier_shrinks_below_its_tokens(call: Call) -> bool:
    return bool(len(tiers(call)[1]) > call.args.get("warm_length", 99))


@state("tiered", "update_policy")
def the_tail_changes_its_dtype_while_it_holds_tokens(call: Call) -> bool:
    return (
        bool(tiers(call)[0]) and call.args.get("tail_dtype", call.model.policy["tail_dtype"]) != call.model.policy["tail_dtype"]
    )


@state("tiered", "update_policy")
def the_store_changes_its_format_while_it_holds_tokens(call: Call) -> bool:
    now = call.model.policy["store_format"]
    return bool(tiers(call)[2]) and call.args.get("store_format", now) != now


@state("tiered", "stats")
def tokens_of_two_formats_lie_in_one_tier(call: Call) -> bool:
    return any(len({token.format for token in tokens}) > 1 for tokens in tiers(call))


@state("tiered", "append")
def tokens_of_an_old_format_are_evicted_and_those_of_a_new_one_stay(call: Call) -> bool:
    store = tiers(call)[2]
    return evicts(call) and len({token.format for token in store}) > 1


@state("tiered", "update_policy", raising="ConfigError")
def a_policy_is_refused_while_tokens_are_there(call: Call) -> bool:
    return bool(call.model.tiers.tokens)


@state("tiered", "clear")
def a_store_with_tokens_is_cleared(call: Call) -> bool:
    return bool(tiers(call)[2])


@state("tiered", "append")
def fewer_tokens_follow_a_clear_of_more(call: Call) -> bool:
    return bool(0 < call.model.tiers.appended + call.tokens < call.past.most.get(call.on, 0))


@state("tiered", "attend")
def attention_goes_over_the_tail_and_the_store(call: Call) -> bool:
    return bool(tiers(call)[0] and tiers(call)[2])


def note_tiered(call: Call) -> None:
    if call.op == "tiered.clear":
        call.past.most[call.on] = len(call.model.tiers.tokens)


NOTES["tiered"] = note_tiered
refusals("pooled", "ShapeMismatch", "DtypeMismatch", "BufferTooLarge")


def goes(call: Call) -> int:
    """Blocks that an append to a pooled cache lets go."""
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
