"""State machine of the family `tiered`: random call sequences."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.tiered.model import Tiered
from kvref_conformance.families.tiered.tier_model import StoredToken
from kvref_conformance.fuzz.base_machine import TOKEN_COUNT, TRUNCATION, FamilyStateMachine, make_pair
from kvref_conformance.fuzz.row_generators import row_kinds
from kvref_conformance.fuzz.state_registry import NOTES, ModelCall, register_error_states, state
from kvref_conformance.oracle.formats import group_of
from kvref_conformance.testlib.fixtures import supports

SIZE = st.integers(1, 3)
WARM_FORMATS = ("q8", "int8", "q8_0", "int8_hadamard")
STORE_FORMATS = ("q8", "q4", "int8", "float8_e5m2", "uint4_g32_float16", "q8_0_hadamard", "float8_e4m3fn_static")
POLICIES = {
    "tail_length": st.integers(0, 4),
    "warm_length": st.integers(0, 2),
    "tail_dtype": st.sampled_from(("float32", "float16", "bfloat16", "int8")),
    "warm_format": st.sampled_from(("q8", "int8", "float16", "mxfp4")),
    "store_format": st.sampled_from(("q4", "q8", "float8_e4m3fn", "float32", "q4_1", "q4_0_hadamard")),
}


class TieredStateMachine(FamilyStateMachine):
    family = "tiered"

    @initialize(
        heads=SIZE, dim=SIZE, most=st.sampled_from((3, 7, 9, 5, 1)), tail=st.sampled_from((1, 2, 3, 0, 9, 0)),
        warm=st.sampled_from((0, 1, 2, 0, 3)),
        tail_dtype=st.sampled_from(("float32", "float16", "bfloat16")), warm_format=st.sampled_from(WARM_FORMATS),
        store_format=st.sampled_from(STORE_FORMATS),
        batch=st.sampled_from((1, 3, 100)),
    )  # fmt: skip
    def new(
        self, heads: int, dim: int, most: int, tail: int, warm: int, tail_dtype: str, warm_format: str, store_format: str,
        batch: int,
    ) -> None:  # fmt: skip
        tail = min(tail, most)
        formats = [
            self.format_for(self.family, name, each)
            for name, each in (("warm_format", warm_format), ("store_format", store_format))
        ]
        dim = max(dim, *(group_of(each or "") for each in formats))
        self.make_object(
            num_kv_heads=heads, head_dim=dim, max_tokens=most, tail_length=tail, tail_dtype=tail_dtype,
            warm_length=min(warm, most - tail), warm_format=warm_format, store_format=store_format, migration_batch=batch,
        )  # fmt: skip
        if self.objects:
            self.shape = self.config["num_kv_heads"], self.config["head_dim"]

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        self.edited = self.objects[0]
        model = self.models[self.edited]
        assert isinstance(model, Tiered)
        changes = ({"tail_length": 1}, {"tail_length": 3}, {"warm_length": 1}, {"store_format": "q8"}, {"store_format": "q4"},
                   {"warm_format": "int8"}, {"tail_length": 0}, {"warm_length": 0})  # fmt: skip

        def update_policy(number: int) -> None:
            if all(supports(self.subject, name, value) for name, value in changes[number].items()):
                self.call("update_policy", self.edited, **changes[number])

        return {
            "append": lambda number: self.append(1 + number, "uneven"),
            "update_policy": update_policy,
        } | self.cache_edits(lambda: model.tiers.appended)

    @precondition(lambda self: self.objects)
    @rule(count=TOKEN_COUNT | TOKEN_COUNT | st.integers(6, 16), kind=row_kinds())
    def append(self, count: int, kind: str) -> None:
        keys, values = make_pair(self.source, (count, *self.shape), kind)
        self.call("append", self.objects[0], keys=keys, values=values)

    append_more = append

    @precondition(lambda self: self.objects)
    @rule(wrong=st.integers(0, 5), side=st.integers(0, 2))
    def append_wrongly(self, wrong: int, side: int) -> None:
        keys, values = self.source.wrong_pair((2, *self.shape), wrong, side)
        self.call("append", self.objects[0], keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(
        data=st.data(),
        names=st.lists(st.sampled_from((*POLICIES, "tail_length", "warm_length", "store_format")), min_size=1, max_size=2),
    )
    def update_policy(self, data: Any, names: list[str]) -> None:
        changes = {name: data.draw(POLICIES[name]) for name in names}
        if all(supports(self.subject, name, value) for name, value in changes.items()):
            self.call("update_policy", self.objects[0], **changes)
            self.append(1, "counting")

    @precondition(lambda self: self.objects)
    @rule(back=TRUNCATION, longer=st.sampled_from((0, 3, 0, 1)), count=TOKEN_COUNT, kind=row_kinds())
    def truncate(self, back: int, longer: int, count: int, kind: str) -> None:
        """longer: tokens by which the tail grows first, while the store has a token, so that `truncate` can remove tokens
        whose append migrated no other token.
        """
        model = self.models[self.objects[0]]
        assert isinstance(model, Tiered)
        tail, warm, most = (model.policy[name] for name in ("tail_length", "warm_length", "max_tokens"))
        longer = min(longer, most - warm - tail - 1)
        if tail and longer > 0 and supports(self.subject, "tail_length", tail + longer):
            self.call("clear", self.objects[0])
            self.append(tail + warm + 1, kind)
            self.call("update_policy", self.objects[0], tail_length=tail + longer)
            self.append(longer, kind)
        self.call("truncate", self.objects[0], length=model.tiers.appended - back)
        self.append(count, kind)

    @precondition(lambda self: self.objects)
    @rule(count=TOKEN_COUNT, kind=row_kinds())
    def clear(self, count: int, kind: str) -> None:
        self.call("clear", self.objects[0])
        self.append(count, kind)

    @precondition(lambda self: self.objects)
    @rule(group=st.integers(1, 2), kind=row_kinds(everything=False))
    def attend(self, group: int, kind: str) -> None:
        query = self.source.rows((1, self.shape[0] * group, self.shape[1]), kind)
        self.call("attend", self.objects[0], query=query, scale=0.5)


# States of the tiered cache in which bugs are likely.

register_error_states(
    "tiered", "ShapeMismatch", "DtypeMismatch", "NonFinite", "ConfigError", "PositionOutOfRange", "NotTruncatable"
)
TAIL, WARM, STORE = "tail", "warm", "store"


def tiers(call: ModelCall) -> list[list[StoredToken]]:
    """The tokens of a tiered cache, by tier: newest tier first."""
    tokens = call.model.tiers.tokens
    return [[token for token in tokens if token.tier == tier] for tier in (TAIL, WARM, STORE)]


def evicts(call: ModelCall) -> bool:
    """Whether an append evicts some of the tokens that were cached before it, but not all."""
    there, most = len(call.model.tiers.tokens), call.model.policy["max_tokens"]
    return there > 0 and call.tokens < most < there + call.tokens


def enters_the_store(call: ModelCall) -> int:
    """Number of tokens that have entered the store since creation, after an append, if the policy never changed."""
    policy = call.model.policy
    return int(call.model.tiers.appended + call.tokens - policy["tail_length"] - policy["warm_length"])


@state("tiered", "append")
def some_tokens_are_evicted(call: ModelCall) -> bool:
    return evicts(call)


@state("tiered", "append")
def some_tokens_are_evicted_while_every_tier_holds_some(call: ModelCall) -> bool:
    return evicts(call) and all(tiers(call))


@state("tiered", "append")
def an_append_is_longer_than_the_cache_and_it_holds_tokens(call: ModelCall) -> bool:
    return bool(call.model.tiers.tokens) and call.tokens > call.model.policy["max_tokens"]


@state("tiered", "append")
def a_cache_with_tokens_is_filled_exactly(call: ModelCall) -> bool:
    there = len(call.model.tiers.tokens)
    return bool(0 < there < call.model.policy["max_tokens"] == there + call.tokens)


@state("tiered", "append")
def the_tail_wraps_around(call: ModelCall) -> bool:
    before, length = call.model.tiers.appended, call.model.policy["tail_length"]
    return bool(length > 1 and 0 < before % length < length < before % length + call.tokens)


@state("tiered", "append")
def the_warm_tier_wraps_around(call: ModelCall) -> bool:
    policy = call.model.policy
    return policy["warm_length"] > 1 and enters_the_store(call) > 0 and bool(tiers(call)[1]) and call.tokens > 0


@state("tiered", "append")
def the_store_wraps_around(call: ModelCall) -> bool:
    return bool(tiers(call)[2]) and enters_the_store(call) > call.model.policy["max_tokens"] > 1


@state("tiered", "append")
def more_moves_on_than_a_batch(call: ModelCall) -> bool:
    overflow = len(tiers(call)[0]) + call.tokens - call.model.policy["tail_length"]
    return bool(tiers(call)[0]) and overflow > call.history.configs[call.on]["migration_batch"]


@state("tiered", "append")
def there_is_no_tail(call: ModelCall) -> bool:
    return call.model.policy["tail_length"] == 0 and bool(call.model.tiers.tokens) and call.tokens > 0


@state("tiered", "append")
def there_is_a_warm_tier_and_no_tail(call: ModelCall) -> bool:
    policy = call.model.policy
    return policy["tail_length"] == 0 < policy["warm_length"] and enters_the_store(call) > 0 and call.tokens > 0


@state("tiered", "update_policy")
def the_policy_changes_while_every_tier_holds_tokens(call: ModelCall) -> bool:
    return all(tiers(call))


@state("tiered", "update_policy")
def the_tail_shrinks_below_its_tokens(call: ModelCall) -> bool:
    return bool(len(tiers(call)[0]) > call.args.get("tail_length", 99))


@state("tiered", "update_policy")
def the_tail_grows_while_the_store_holds_tokens(call: ModelCall) -> bool:
    return bool(tiers(call)[2]) and call.args.get("tail_length", 0) > call.model.policy["tail_length"]


@state("tiered", "update_policy")
def the_warm_tier_shrinks_below_its_tokens(call: ModelCall) -> bool:
    return bool(len(tiers(call)[1]) > call.args.get("warm_length", 99))


@state("tiered", "update_policy")
def the_tail_changes_its_dtype_while_it_holds_tokens(call: ModelCall) -> bool:
    return (
        bool(tiers(call)[0]) and call.args.get("tail_dtype", call.model.policy["tail_dtype"]) != call.model.policy["tail_dtype"]
    )


@state("tiered", "update_policy")
def the_store_changes_its_format_while_it_holds_tokens(call: ModelCall) -> bool:
    now = call.model.policy["store_format"]
    return bool(tiers(call)[2]) and call.args.get("store_format", now) != now


@state("tiered", "stats")
def tokens_of_two_formats_lie_in_one_tier(call: ModelCall) -> bool:
    return any(len({token.format for token in tokens}) > 1 for tokens in tiers(call))


@state("tiered", "append")
def tokens_of_an_old_format_are_evicted_and_those_of_a_new_one_stay(call: ModelCall) -> bool:
    store = tiers(call)[2]
    return evicts(call) and len({token.format for token in store}) > 1


@state("tiered", "update_policy", raising="ConfigError")
def a_policy_is_refused_while_tokens_are_there(call: ModelCall) -> bool:
    return bool(call.model.tiers.tokens)


@state("tiered", "clear")
def a_store_with_tokens_is_cleared(call: ModelCall) -> bool:
    return bool(tiers(call)[2])


@state("tiered", "truncate")
def some_tokens_go_and_some_stay(call: ModelCall) -> bool:
    return bool(0 < call.args["length"] < call.model.tiers.appended)


@state("tiered", "truncate")
def tokens_go_where_older_ones_lie_in_the_store(call: ModelCall) -> bool:
    return bool(tiers(call)[2] and tiers(call)[0] and call.args["length"] < call.model.tiers.appended)


@state("tiered", "truncate")
def quantized_tokens_go(call: ModelCall) -> bool:
    newest = call.model.tiers.tokens[-1:]
    return bool(call.args["length"] < call.model.tiers.appended and newest and newest[0].tier != TAIL)


@state("tiered", "append")
def tokens_move_on_after_a_truncate(call: ModelCall) -> bool:
    tail, room = tiers(call)[0], call.model.policy["tail_length"]
    return bool(call.model.last_change == "truncate" and tail and len(tail) + call.tokens > room)


@state("tiered", "append")
def fewer_tokens_follow_a_clear_of_more(call: ModelCall) -> bool:
    return bool(0 < call.model.tiers.appended + call.tokens < call.history.max_tokens.get(call.on, 0))


@state("tiered", "attend")
def attention_goes_over_the_tail_and_the_store(call: ModelCall) -> bool:
    return bool(tiers(call)[0] and tiers(call)[2])


def note_tiered(call: ModelCall) -> None:
    if call.op == "tiered.clear":
        call.history.max_tokens[call.on] = len(call.model.tiers.tokens)


NOTES["tiered"] = note_tiered
