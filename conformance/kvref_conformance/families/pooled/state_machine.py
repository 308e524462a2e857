"""The state machine of the family `pooled`."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.pooled.model import Pooled
from kvref_conformance.fuzz.base_machine import TOKEN_COUNT, FamilyStateMachine, choose_one, make_pair
from kvref_conformance.fuzz.row_generators import row_kinds
from kvref_conformance.fuzz.state_registry import NOTES, ModelCall, register_error_states, state

INDEX = st.integers(0, 5)
SIZE = st.integers(1, 3)


class PooledStateMachine(FamilyStateMachine):
    family = "pooled"

    @initialize(
        heads=SIZE, dim=st.sampled_from((1, 3, 300)), block=st.sampled_from((1, 2, 3, 4, 300)),
        most=st.sampled_from((3, 7, 4, 8, 12)), caches=st.integers(1, 2), buffers=st.integers(1, 3),
    )  # fmt: skip
    def new(self, heads: int, dim: int, block: int, most: int, caches: int, buffers: int) -> None:
        can_share = caches > 1 and hasattr(self.search.implementation, "buffers")
        shared = {"pool": self.make_other("buffers", max_buffers=buffers)} if can_share else {}
        for _ in range(caches):
            self.make_object(num_kv_heads=heads, head_dim=dim, tokens_per_block=block, max_tokens=max(most, block), **shared)
        if self.objects:
            self.shape = self.config["num_kv_heads"], self.config["head_dim"]

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        self.edited = choose_one(self.objects, which)
        return {"append": lambda number: self.append(which, 1 + number, "uneven")} | self.cache_edits(lambda: 0)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, count=TOKEN_COUNT | TOKEN_COUNT | st.integers(6, 16), kind=row_kinds())
    def append(self, which: int, count: int, kind: str) -> None:
        keys, values = make_pair(self.source, (count, *self.shape), kind)
        self.call("append", choose_one(self.objects, which), keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, wrong=st.integers(0, 5), side=st.integers(0, 2))
    def append_wrongly(self, which: int, wrong: int, side: int) -> None:
        keys, values = self.source.wrong_pair((2, *self.shape), wrong, side)
        self.call("append", choose_one(self.objects, which), keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(which=INDEX, count=TOKEN_COUNT, kind=row_kinds())
    def clear(self, which: int, count: int, kind: str) -> None:
        self.call("clear", choose_one(self.objects, which))
        self.append(which, count, kind)


# The states of the pooled cache that random call sequences should reach, because bugs depend on them.

register_error_states("pooled", "ShapeMismatch", "DtypeMismatch", "BufferTooLarge")


def evicted_blocks(call: ModelCall) -> int:
    """Returns how many blocks the append evicts."""
    model: Pooled = call.model
    return max(0, -(-(len(model.tokens) + call.tokens - model.most) // model.per_block))


@state("pooled", "append")
def a_block_is_evicted_while_the_newest_is_partly_filled(call: ModelCall) -> bool:
    return 0 < evicted_blocks(call) < call.model.blocks and bool(len(call.model.tokens) % call.model.per_block)


@state("pooled", "append")
def several_blocks_are_evicted_and_some_stay(call: ModelCall) -> bool:
    return bool(1 < evicted_blocks(call) < call.model.blocks)


@state("pooled", "append")
def an_append_evicts_all_blocks_and_some_of_its_own_tokens(call: ModelCall) -> bool:
    return bool(call.model.tokens) and evicted_blocks(call) > call.model.blocks


@state("pooled", "append")
def a_partly_filled_block_is_filled_and_another_opened(call: ModelCall) -> bool:
    model: Pooled = call.model
    partly = len(model.tokens) % model.per_block
    return bool(partly) and partly + call.tokens > model.per_block and not evicted_blocks(call)


@state("pooled", "append")
def it_is_filled_to_the_last_token(call: ModelCall) -> bool:
    return bool(call.tokens and call.model.tokens) and len(call.model.tokens) + call.tokens == call.model.most


@state("pooled", "append")
def a_block_is_evicted_whose_size_does_not_divide_max_tokens(call: ModelCall) -> bool:
    return evicted_blocks(call) > 0 and bool(call.model.most % call.model.per_block) and bool(call.model.tokens)


@state("pooled", "append")
def a_block_is_opened_in_released_memory(call: ModelCall) -> bool:
    model: Pooled = call.model
    size = model.size
    return bool(size and model.pool.free[size] and model.pool.returns) and call.tokens > model.blocks * model.per_block - len(
        model.tokens
    )


@state("pooled", "append")
def a_block_is_opened_in_memory_that_another_cache_released(call: ModelCall) -> bool:
    return a_block_is_opened_in_released_memory(call) and any(other != call.on for other in call.history.max_tokens)


@state("pooled", "read")
def two_caches_of_one_pool_contain_tokens(call: ModelCall) -> bool:
    caches = [each for each in call.models.values() if isinstance(each, Pooled) and each.shared]
    return sum(bool(each.tokens) for each in caches) > 1


@state("pooled", "clear")
def a_partly_filled_block_is_cleared(call: ModelCall) -> bool:
    return bool(len(call.model.tokens) % call.model.per_block)


@state("pooled", "append")
def fewer_tokens_are_appended_after_a_clear(call: ModelCall) -> bool:
    return not call.model.tokens and 0 < call.tokens < call.history.max_tokens.get(call.on, 0)


@state("pooled", "clear")
def clear_releases_more_buffers_than_the_pool_keeps(call: ModelCall) -> bool:
    model: Pooled = call.model
    return bool(model.size) and model.pool.free[model.size] + 2 * model.blocks > model.pool.most


def note_pooled(call: ModelCall) -> None:
    if call.op == "pooled.clear" and call.model.tokens:
        call.history.max_tokens[call.on] = len(call.model.tokens)


NOTES["pooled"] = note_pooled
