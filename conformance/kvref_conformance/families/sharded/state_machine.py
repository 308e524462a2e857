"""State machine of the family `sharded`: random call sequences."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.sharded.model import Sharded
from kvref_conformance.fuzz.base_machine import ANY_INDEX, LAST_INDEX, TOKEN_COUNT, TRUNCATION, FamilyStateMachine, make_pair
from kvref_conformance.fuzz.row_generators import row_kinds
from kvref_conformance.fuzz.state_registry import NOTES, ModelCall, register_error_states, state

# Heads, rows and columns: divided heads and copied heads, with and without several columns.
GRID = st.sampled_from((
    (2, 2, 2), (1, 1, 3), (2, 4, 1), (2, 1, 2), (1, 2, 2), (3, 3, 1), (2, 1, 1), (4, 2, 2), (6, 2, 1), (1, 2, 2),
))  # fmt: skip
RANK = st.sampled_from((*range(8), LAST_INDEX))
QUERIES = st.sampled_from((1, 3, 99, 2, 3, 0))  # 99: one query per token


class ShardedStateMachine(FamilyStateMachine):
    family = "sharded"

    @initialize(
        grid=GRID, size=st.sampled_from((2, 1, 3)), blocks=st.sampled_from((3, 2, 5, 1)), dim=st.sampled_from((1, 3)),
        dtype=st.sampled_from(("float32", "float16", "bfloat16")),
    )  # fmt: skip
    def new(self, grid: tuple[int, int, int], size: int, blocks: int, dim: int, dtype: str) -> None:
        heads, rows, columns = grid
        self.make_object(
            num_kv_heads=heads, head_dim=dim, head_ranks=rows, token_ranks=columns, block_size=size, num_blocks=blocks,
            dtype=dtype,
        )  # fmt: skip

    @property
    def model(self) -> Sharded:
        model = self.models[self.objects[0]]
        assert isinstance(model, Sharded)
        return model

    def rank(self, which: int) -> int:
        """An existing rank for any index, or for LAST_INDEX one that does not exist."""
        return len(self.model.ranks) if which == LAST_INDEX else which % len(self.model.ranks)

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        self.edited = self.objects[0]
        return {
            "append": lambda number: self.append(1 + number % 4, "uneven"),
            "lose": lambda number: self.call("lose", self.edited, rank=self.rank(number)),
            "lose_in_append": lambda number: self.call("lose_in_append", self.edited, rank=self.rank(number)),
        } | self.cache_edits(lambda: len(self.model.tokens))

    @precondition(lambda self: self.objects)
    @rule(count=TOKEN_COUNT, kind=row_kinds())
    def append(self, count: int, kind: str) -> None:
        kind = "counting" if self.model.failing and kind in ("nan", "infinity") else kind  # either of two errors would be valid
        keys, values = make_pair(self.source, (count, *self.model.row), kind)
        self.call("append", self.objects[0], keys=keys, values=values)

    append_more = append

    @precondition(lambda self: self.objects)
    @rule(wrong=st.integers(0, 5), side=st.integers(0, 2))
    def append_wrongly(self, wrong: int, side: int) -> None:
        keys, values = self.source.wrong_pair((2, *self.model.row), wrong, side)
        self.call("append", self.objects[0], keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(count=QUERIES, more=st.sampled_from((0, 0, 0, 1)), group=st.integers(1, 3), kind=row_kinds(everything=False))
    def attend(self, count: int, more: int, group: int, kind: str) -> None:
        """more: 1 for more queries than tokens."""
        heads, dim = self.model.row
        length, group = len(self.model.tokens), self.subject.size("group_size", group)
        query = self.source.rows((min(count, length) + more * (length + 1), heads * group, dim), kind)
        self.call_quietly("attend", self.objects[0], query=query, scale=0.5)

    attend_more = attend
    attend_again = attend

    @precondition(lambda self: self.objects)
    @rule(back=TRUNCATION, count=TOKEN_COUNT, kind=row_kinds())
    def truncate(self, back: int, count: int, kind: str) -> None:
        self.call("truncate", self.objects[0], length=len(self.model.tokens) - back)
        self.append(count, kind)

    truncate_again = truncate

    @precondition(lambda self: self.objects)
    @rule(count=TOKEN_COUNT, kind=row_kinds())
    def clear(self, count: int, kind: str) -> None:
        self.call("clear", self.objects[0])
        self.append(count, kind)

    @precondition(lambda self: self.objects)
    @rule(which=RANK, name=st.sampled_from(("heads", "read_rank", "positions", "block_table", "num_bytes")))
    def look_at(self, which: int, name: str) -> None:
        self.call_quietly(name, self.objects[0], rank=self.rank(which))

    @precondition(lambda self: self.objects and len(self.model.tokens) > 1)
    @rule(which=RANK, in_append=st.sampled_from((True, True, False)), count=TOKEN_COUNT, again=ANY_INDEX)
    def lose(self, which: int, in_append: bool, count: int, again: int) -> None:
        """Lose a rank at once or during the next append, then call an operation on it."""
        rank = self.rank(which)
        self.call("lose_in_append" if in_append else "lose", self.objects[0], rank=rank)
        if in_append:
            self.append(count, "counting")
        name = ("read_rank", "positions", "lose")[again % 3]
        self.call(name, self.objects[0], rank=rank)


# States of the sharded cache in which bugs are likely.

register_error_states(
    "sharded", "ShapeMismatch", "DtypeMismatch", "CapacityExceeded", "PositionOutOfRange", "RankOutOfRange", "RankLost",
)  # fmt: skip


def turn(model: Sharded) -> int:
    """Number of tokens in one block of every column."""
    return model.size * model.columns


def reached(call: ModelCall) -> set[int]:
    """The columns that an append writes tokens to."""
    model: Sharded = call.model
    length = len(model.tokens)
    return {at // model.size % model.columns for at in range(length, length + call.tokens)}


@state("sharded", "append")
def an_append_begins_and_ends_inside_blocks_of_different_columns(call: ModelCall) -> bool:
    model: Sharded = call.model
    length, end = len(model.tokens), len(model.tokens) + call.tokens
    return bool(length % model.size and end % model.size and len(reached(call)) > 1)


@state("sharded", "append")
def an_append_comes_round_to_the_column_where_it_began(call: ModelCall) -> bool:
    return bool(call.model.columns > 1 and call.tokens > turn(call.model))


@state("sharded", "append")
def an_append_brings_nothing_to_some_column(call: ModelCall) -> bool:
    return bool(0 < len(reached(call)) < call.model.columns)


@state("sharded", "append")
def a_copy_of_a_head_is_written_to_what_it_holds(call: ModelCall) -> bool:
    return bool(call.model.rows > call.model.row[0] and call.tokens and call.model.tokens)


@state("sharded", "append")
def copies_of_heads_lie_in_several_columns(call: ModelCall) -> bool:
    return bool(a_copy_of_a_head_is_written_to_what_it_holds(call) and call.model.columns > 1)


@state("sharded", "append")
def it_is_filled_to_the_last_token(call: ModelCall) -> bool:
    model: Sharded = call.model
    return bool(call.tokens and model.tokens) and len(model.tokens) + call.tokens == model.blocks * turn(model)


@state("sharded", "append", raising="CapacityExceeded")
def some_of_the_tokens_would_fit(call: ModelCall) -> bool:
    return bool(0 < len(call.model.tokens) < call.model.blocks * turn(call.model))


@state("sharded", "truncate")
def some_blocks_go_and_some_stay(call: ModelCall) -> bool:
    model: Sharded = call.model
    return bool(0 < -(-call.args["length"] // turn(model)) < model.entries)


@state("sharded", "truncate")
def tokens_go_from_some_column_only(call: ModelCall) -> bool:
    model: Sharded = call.model
    gone = {at // model.size % model.columns for at in range(call.args["length"], len(model.tokens))}
    return bool(0 < len(gone) < model.columns)


@state("sharded", "append")
def blocks_are_taken_that_a_truncate_gave_back(call: ModelCall) -> bool:
    model: Sharded = call.model
    more = -(-(len(model.tokens) + call.tokens) // turn(model)) > model.entries
    return bool(more and model.last_change == "truncate" and "some blocks go and some stay" in call.history.reached)


@state("sharded", "append")
def fewer_tokens_are_appended_after_a_clear(call: ModelCall) -> bool:
    return not call.model.tokens and 0 < call.tokens < call.history.max_tokens.get(call.on, 0)


@state("sharded", "attend")
def a_column_without_tokens_is_attended_to(call: ModelCall) -> bool:
    model: Sharded = call.model
    return bool(len(call.args["query"]) and len(model.tokens) <= model.size * (model.columns - 1))


@state("sharded", "attend")
def queries_in_different_columns_see_different_tokens(call: ModelCall) -> bool:
    model: Sharded = call.model
    count = len(call.args["query"])
    return bool(model.columns > 1 and count > model.size and len(model.tokens) > count)


@state("sharded", "attend")
def copies_divide_the_query_heads_of_one(call: ModelCall) -> bool:
    model: Sharded = call.model
    return bool(model.rows > model.row[0] and model.tokens and call.args["query"].shape[1] > model.row[0])


@state("sharded", "attend")
def some_copy_has_no_query_head_to_answer(call: ModelCall) -> bool:
    model: Sharded = call.model
    return bool(model.tokens and len(call.args["query"]) and model.rows > call.args["query"].shape[1])


@state("sharded", "append", raising="RankLost")
def a_rank_is_lost_in_an_append_to_what_is_there(call: ModelCall) -> bool:
    return bool(call.model.failing and call.model.tokens)


@state("sharded", "append", raising="RankLost")
def a_rank_is_lost_in_an_append_that_takes_a_block(call: ModelCall) -> bool:
    model: Sharded = call.model
    return bool(model.failing) and -(-(len(model.tokens) + call.tokens) // turn(model)) > model.entries


@state("sharded", "append", raising="RankLost")
def a_rank_is_lost_that_the_tokens_do_not_come_to(call: ModelCall) -> bool:
    return any(rank % call.model.columns not in reached(call) for rank in call.model.failing)


@state("sharded", "read_rank")
def a_rank_that_is_left_is_read(call: ModelCall) -> bool:
    return bool(call.model.lost and call.model.tokens)


def note_sharded(call: ModelCall) -> None:
    if call.op == "sharded.clear" and call.model.tokens:
        call.history.max_tokens[call.on] = len(call.model.tokens)


NOTES["sharded"] = note_sharded
