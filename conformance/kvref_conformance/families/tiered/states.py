"""States of the tiered cache in which bugs are likely."""

from kvref_conformance.families.tiered.tiers import Token
from kvref_conformance.searching.states import NOTES, Call, refusals, state

refusals("tiered", "ShapeMismatch", "DtypeMismatch", "NonFinite", "ConfigError", "PositionOutOfRange", "NotTruncatable")
TAIL, WARM, STORE = "tail", "warm", "store"


def tiers(call: Call) -> list[list[Token]]:
    """The tokens of a tiered cache, by tier: newest tier first."""
    tokens = call.model.tiers.tokens
    return [[token for token in tokens if token.tier == tier] for tier in (TAIL, WARM, STORE)]


def evicts(call: Call) -> bool:
    """Whether an append evicts some of the tokens that were cached before it, but not all."""
    there, most = len(call.model.tiers.tokens), call.model.policy["max_tokens"]
    return there > 0 and call.tokens < most < there + call.tokens


def enters_the_store(call: Call) -> int:
    """Number of tokens that have entered the store since creation, after an append, if the policy never changed."""
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


@state("tiered", "truncate")
def some_tokens_go_and_some_stay(call: Call) -> bool:
    return bool(0 < call.args["length"] < call.model.tiers.appended)


@state("tiered", "truncate")
def tokens_go_where_older_ones_lie_in_the_store(call: Call) -> bool:
    return bool(tiers(call)[2] and tiers(call)[0] and call.args["length"] < call.model.tiers.appended)


@state("tiered", "truncate")
def quantized_tokens_go(call: Call) -> bool:
    newest = call.model.tiers.tokens[-1:]
    return bool(call.args["length"] < call.model.tiers.appended and newest and newest[0].tier != TAIL)


@state("tiered", "append")
def tokens_move_on_after_a_truncate(call: Call) -> bool:
    tail, room = tiers(call)[0], call.model.policy["tail_length"]
    return bool(call.model.last == "truncate" and tail and len(tail) + call.tokens > room)


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
