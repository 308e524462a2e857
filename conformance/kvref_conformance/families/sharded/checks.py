"""SHARD-01 to 04: the heads, tokens and blocks of each rank."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.sharded.law_adapter import CALLS_OF_A_RANK, grids
from kvref_conformance.families.sharded.model import NUMBER_BYTES, Sharded
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import PLAIN_FORMATS
from kvref_conformance.oracle.formats.small_floats import round_to
from kvref_conformance.testlib.assertions import (
    LOUD_FACTOR,
    LOUD_SCALE,
    assert_equal,
    assert_pair,
    assert_same,
    assert_within,
    default_scale,
    expected_attention,
    may_raise,
    normal_rows,
    raises,
)
from kvref_conformance.testlib.fixtures import (
    assert_config_error,
    clamp_to_limits,
    construct,
    random_pair,
    round_to_input_dtype,
    supported_formats,
    supports,
)
from kvref_conformance.testlib.integer_types import Observation, TypedIntegers, assert_same_for_integer_types
from kvref_conformance.testlib.production_sizes import affordable_tokens, power_of_two_edges
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.session import Session
from kvref_conformance.testlib.tagged_content import WrittenContent, assert_content, content_pair, token_content

HEADS = ((4, 2), (4, 4), (3, 1), (3, 3), (1, 2), (1, 3), (3, 6), (6, 2), (9, 3), (8, 2))  # kv heads and rows
PARTS = (1, 2, 5, 1, 3, 1, 4)  # lengths of consecutive appends
CONTENTS = ("length", "positions", "read_rank")


def heads_and_rows(subject: Subject) -> Iterator[dict[str, Any]]:
    """Configurations for those pairs of HEADS that the limits allow: divided heads, and copied heads."""
    for heads, rows in HEADS:
        if supports(subject, "num_kv_heads", heads) and supports(subject, "head_ranks", rows):
            yield clamp_to_limits(subject, "sharded", num_kv_heads=heads, head_ranks=rows)


class ShardedFixture(Session):
    """A sharded cache. per_entry: the number of tokens that one entry of the block table stands for, in all columns."""

    model: Sharded

    def __init__(self, subject: Subject, **config: Any) -> None:
        """config: allowed sizes, as returned by `grids` or `clamp_to_limits`."""
        super().__init__(subject, lambda: construct(subject, "sharded", **config))
        self.size, self.columns = config["block_size"], config["token_ranks"]
        self.per_entry = self.size * self.columns
        self.room = config["num_blocks"] * self.per_entry
        self.ranks = range(config["head_ranks"] * self.columns)
        self.row = config["num_kv_heads"], config["head_dim"]

    def __len__(self) -> int:
        return len(self.model.tokens)

    def random_tokens(self, count: int) -> tuple[NDArray, NDArray]:
        return random_pair(self.subject, count, *self.row)

    def append(self, *counts: int) -> None:
        """Appends random tokens in calls of `counts` tokens, or fewer if there is less room."""
        for count in counts:
            self.cache.append(*self.random_tokens(min(count, self.room - len(self))))

    def attend(self, count: int, group: int = 2) -> None:
        """Calls `attend` with random queries of the last `count` tokens."""
        heads = self.row[0] * self.subject.size("group_size", group)
        self.cache.attend(normal_rows(self.subject, count, heads, self.row[1]), default_scale(self.subject))

    def look(self, *names: str) -> None:
        """Makes the calls that read the length, every rank, and the whole cache, or the calls with these names."""
        super().look(*(names or (*CONTENTS, "read")))

    def block_table(self) -> list[int]:
        """Returns the block table of the first rank, after a look at those of all ranks."""
        self.look("block_table")
        return [int(block) for block in self.cache.block_table(0)]


@check("SHARD-01abd", "sharded")
def heads_returns_the_share_of_a_row_or_its_copy(subject: Subject) -> None:
    tried = 0
    for config in heads_and_rows(subject):
        run = ShardedFixture(subject, **config)
        run.append(*PARTS)
        heads, rows = config["num_kv_heads"], config["head_ranks"]
        for rank in run.ranks:
            row = rank // run.columns
            share = list(range(heads))[row * heads // rows :][: heads // rows] if heads > rows else [row // (rows // heads)]
            assert_equal([int(head) for head in run.cache.heads(rank)], share, f"heads of rank {rank}")
        run.look()
        tried += 1
    if not tried:
        raise NotOffered("a number of heads that head_ranks divides or is divided by, where its limits do not allow it")


@check("SHARD-01d", "sharded")
def read_returns_the_tokens_that_one_device_would(subject: Subject) -> None:
    in_dtypes = (next(grids(subject, (4, 3), dtype=dtype)) for dtype in supported_formats(subject, "dtype", *PLAIN_FORMATS))
    for config in (*grids(subject), *in_dtypes):
        run = ShardedFixture(subject, **config)
        keys, values = run.random_tokens(min(run.room, sum(PARTS)))
        for stop, count in zip(np.cumsum(PARTS), PARTS, strict=True):
            run.cache.append(keys[stop - count : stop], values[stop - count : stop])
            run.look()
        assert_pair(run.cache.read(), (round_to(keys, config["dtype"]), round_to(values, config["dtype"])), f"tokens in {config}")


@check("SHARD-01c", "sharded")
def new_with_heads_that_cannot_be_divided_or_copied_raises(subject: Subject) -> None:
    tried = 0
    for heads, rows in ((2, 3), (3, 2), (4, 6), (6, 4), (3, 5)):
        if supports(subject, "num_kv_heads", heads) and supports(subject, "head_ranks", rows):
            assert_config_error(subject, "sharded", num_kv_heads=heads, head_ranks=rows)
            tried += 1
    if not tried:
        raise NotOffered("a number of heads and head_ranks, neither of which divides the other, where its limits do not allow it")


@check("SHARD-02a", "sharded")
def append_puts_each_token_into_one_column(subject: Subject) -> None:
    for size in dict.fromkeys(subject.size("block_size", wanted) for wanted in (1, 2, 3, 5)):
        for config in grids(subject, (2, 3), (1, 2), (4, 4), block_size=size):
            run = ShardedFixture(subject, **config)
            run.append(size * run.columns * 2 + size + 1)
            for first in run.ranks[:: run.columns]:
                row = [int(position) for rank in range(first, first + run.columns) for position in run.cache.positions(rank)]
                assert_equal(sorted(row), list(range(len(run))), "positions of all ranks of a row")
            run.look()


@check("SHARD-02a", "sharded")
def append_begins_and_ends_in_any_slot_of_any_column(subject: Subject) -> None:
    for config in grids(subject, (2, 3), (1, 4), block_size=subject.size("block_size", 3)):
        for first in range(1, config["block_size"] * config["token_ranks"] + 1):
            run = ShardedFixture(subject, **config)
            run.append(first, run.per_entry - 1, 1)
            run.look()


@check("SHARD-03a", "sharded")
def block_table_is_the_same_on_every_rank(subject: Subject) -> None:
    for config in grids(subject):
        run = ShardedFixture(subject, **config)
        run.look("block_table")
        turn = run.per_entry
        for count, left in ((1, 1), (turn, turn), (turn - 1, turn - 1), (2 * turn + 1, 0), (turn + 1, turn), (turn, turn + 1)):
            run.append(count)
            tables = [[int(block) for block in run.cache.block_table(rank)] for rank in run.ranks]
            assert_equal(tables, [tables[0]] * len(run.ranks), "block tables of all ranks")
            assert_equal(len(tables[0]), -(-len(run) // turn), f"number of entries at {len(run)} tokens")
            run.cache.truncate(min(left, len(run)))
            run.look("block_table")
        run.look()
        run.cache.clear()
        run.look("block_table")


@check("SHARD-03b", "sharded")
def append_and_truncate_keep_the_other_entries_of_the_table(subject: Subject) -> None:
    for config in grids(subject, (4, 3), (1, 2)):
        run, before = ShardedFixture(subject, **config), list[int]()
        while len(run) < run.room:
            run.append(run.per_entry // 2 + 1)
            table = run.block_table()
            assert_equal(table[: len(before)], before, "table entries from before an append")
            before = table
        for left in (run.room - 1, run.room - run.per_entry - 1, run.per_entry + 1, run.per_entry, 1):
            run.cache.truncate(min(left, len(run)))
            table = run.block_table()
            assert_equal(table, before[: len(table)], "table after truncate, compared with its first entries before")


@check("SHARD-03c", "sharded")
def num_bytes_is_the_size_of_the_blocks(subject: Subject) -> None:
    for dtype in supported_formats(subject, "dtype", *PLAIN_FORMATS):
        for config in grids(subject, (4, 3), (1, 3), (2, 1), (1, 6), dtype=dtype):
            run = ShardedFixture(subject, **config)
            for count in (0, 1, run.size, run.per_entry):
                run.append(count)
                blocks, heads = -(-len(run) // run.per_entry), max(1, run.row[0] // config["head_ranks"])
                want = 2 * blocks * run.size * heads * run.row[1] * NUMBER_BYTES[dtype]
                for rank in run.ranks:
                    assert_equal(run.cache.num_bytes(rank), want, f"num_bytes of rank {rank} at {len(run)} tokens in {dtype}")


@check("SHARD-03de", "sharded")
def append_of_more_tokens_than_fit_raises(subject: Subject) -> None:
    for config in grids(subject, (2, 3), (4, 1), (1, 2)):
        run = ShardedFixture(subject, **config)
        for short in (1, 2, run.size + 1):  # room that is left, in tokens, when more are appended
            run.append(run.room - short - len(run))
            table, over = run.block_table(), run.random_tokens(short + 1)
            with raises("CapacityExceeded"):
                run.cache.append(*over)
            run.look()
            assert_equal(run.block_table(), table, "block table after an append that raised CapacityExceeded")
            run.append(short)
            with raises("CapacityExceeded"):
                run.cache.append(*(part[:1] for part in over))
            run.look()
            run.cache.truncate(run.room // 2)


@check("SHARD-03d", "sharded")
def append_after_truncate_fills_all_blocks(subject: Subject) -> None:
    """The cache is filled repeatedly, so that a block that a rank did not free makes an append fail."""
    for config in grids(subject, (2, 3), (4, 1)):
        run = ShardedFixture(subject, **config)
        for left in (0, 1, run.size, 0, run.room // 2, run.room - 1, 0):
            run.append(run.room)
            run.look("block_table")
            run.cache.truncate(left)
        run.append(run.room)
        run.look()
        assert_equal(sorted(run.block_table()), list(range(config["num_blocks"])), "blocks in the table of a full cache")


# SHARD-02: attention merged from the partial results of all columns.


@check("SHARD-02bc", "sharded")
def attend_merges_the_results_of_all_columns(subject: Subject) -> None:
    """Every length up to two blocks per column, which includes one token, empty columns and partly filled blocks."""
    for config in grids(subject):
        run = ShardedFixture(subject, **config)
        while len(run) < min(2 * run.per_entry + 1, run.room):
            run.append(1)
            run.attend(1)
        for count in (2, run.per_entry, len(run), 0):
            run.attend(min(count, len(run)))


@check("SHARD-02b", "sharded")
def attend_uses_the_kv_head_of_each_query_head(subject: Subject) -> None:
    """Group sizes of models: 4 and 8 (Llama), and 7 (Qwen), which the number of head copies does not divide."""
    for config in heads_and_rows(subject):
        run = ShardedFixture(subject, **config)
        run.append(7)
        for group in dict.fromkeys(subject.size("group_size", wanted) for wanted in (1, 2, 3, 4, 7, 8)):
            run.attend(2, group)


@check("SHARD-02b", "sharded")
def attend_weights_columns_by_their_tokens(subject: Subject) -> None:
    """One token has almost all the weight, at every position, so the partial results of other columns hardly count."""
    scale = default_scale(subject) * LOUD_SCALE
    for config in grids(subject, (1, 3), (2, 2), (4, 3)):
        for place in range(config["block_size"] * config["token_ranks"] + 1):
            run = ShardedFixture(subject, **config)
            keys, values = run.random_tokens(min(run.room, run.per_entry + 2))
            keys[:] = 0
            keys[place % len(keys)] = LOUD_FACTOR
            run.cache.append(keys, values)
            query = np.ones((1, run.row[0] * subject.size("group_size", 2), run.row[1]), np.float32)
            stored = [round_to(part, config["dtype"]) for part in (keys, values)]
            want, bound = expected_attention(subject, query, *stored, scale=scale, ranks=run.columns)
            assert_within(run.cache.attend(query, scale), want, bound, f"attention with almost all weight on token {place}")
            run.cache.attend(-query, scale)


@check("SHARD-02b", "sharded")
def attend_with_large_scores_does_not_overflow(subject: Subject) -> None:
    """Scores are large, and positive in one column and negative in another."""
    for config in grids(subject, (1, 3), (2, 2)):
        run = ShardedFixture(subject, **config)
        keys, values = run.random_tokens(min(run.room, 2 * run.per_entry))
        run.cache.append(round_to_input_dtype(subject, np.sign(keys) * 30), values)
        query = normal_rows(subject, 3 if len(run) > 2 else 1, run.row[0] * subject.size("group_size", 2), run.row[1]) * 30
        run.cache.attend(round_to_input_dtype(subject, query), 1.0)


@check("SHARD-02bc", "sharded")
def attend_ignores_later_tokens_in_every_column(subject: Subject) -> None:
    """Later tokens have larger scores and other values, so attending to one changes the result visibly."""
    for config in grids(subject, (2, 3), (1, 2), (1, 4)):
        run = ShardedFixture(subject, **config)
        keys, values = run.random_tokens(min(run.room, 2 * run.per_entry + 1))
        keys[:] = (np.arange(len(keys), dtype=np.float32) / 4)[:, None, None]
        run.cache.append(round_to_input_dtype(subject, keys), values)
        heads = run.row[0] * subject.size("group_size", 2)
        for count in (2, run.size + 1, len(run)):
            query = np.ones((min(count, len(run)), heads, run.row[1]), np.float32)
            run.cache.attend(query, default_scale(subject) * LOUD_SCALE)


@check("SHARD-02c", "sharded")
def attend_ignores_a_hidden_token_that_is_not_finite(subject: Subject) -> None:
    """The last token is not finite. It must not affect the query before it, in any column."""
    for config in grids(subject, (1, 3), (2, 2)):
        row, dtype = (config["num_kv_heads"], config["head_dim"]), config["dtype"]
        for length in range(2, config["block_size"] * config["token_ranks"] + 2):
            cache, (keys, values) = construct(subject, "sharded", **config), random_pair(subject, length, *row)
            values[-1] = np.nan
            cache.append(keys[:-1], values[:-1])
            appended = False
            with may_raise("NonFinite"):
                cache.append(keys[-1:], values[-1:])
                appended = True
            if not appended:
                raise NotOffered("append of a token that is not finite")
            query = normal_rows(subject, 2, *row)
            stored = [round_to(part[:-1], dtype) for part in (keys, values)]
            want, bound = expected_attention(
                subject, query[:1], *stored, scale=default_scale(subject), ranks=config["token_ranks"]
            )
            got = cache.attend(query, default_scale(subject))[:1]
            assert_within(got, want, bound, f"attention of the query before a NaN at position {length - 1}")


@check("SHARD-02b", "sharded")
def attend_with_one_column_computes_each_head_separately(subject: Subject) -> None:
    """With one column nothing is merged, so each head's result is bit for bit independent of the other heads' queries."""
    config = clamp_to_limits(subject, "sharded", token_ranks=1)
    if config["token_ranks"] != 1 or config["num_kv_heads"] == 1:
        raise NotOffered("several heads on one column of ranks")
    run = ShardedFixture(subject, **config)
    run.append(9)
    group = subject.size("group_size", 2)
    query = normal_rows(subject, 2, run.row[0] * group, run.row[1])
    got = run.cache.attend(query, default_scale(subject))
    for head in range(run.row[0]):
        own = slice(head * group, (head + 1) * group)
        alone = np.zeros_like(query)
        alone[:, own] = query[:, own]
        assert_same(
            run.cache.attend(alone, default_scale(subject))[:, own],
            got[:, own],
            f"attention of kv head {head} with zero queries for the other heads, compared with all queries",
        )


@check("SHARD-02d", "sharded")
def attend_with_more_queries_than_tokens_raises(subject: Subject) -> None:
    for config in grids(subject, (2, 3), (1, 2)):
        run = ShardedFixture(subject, **config)
        query = normal_rows(subject, 5, *run.row)
        for count in (0, 1, 3):
            run.append(count - len(run))
            with raises("PositionOutOfRange"):
                run.cache.attend(query[: count + 1], default_scale(subject))
            run.attend(count)


# EDIT: `truncate` and `clear` have the same effect on every rank.

WANTED = ((2, 3), (4, 1), (1, 2))


# LAW-20: a law in the form that applies to this family only.

SIZES = {"token_ranks": 2, "block_size": 8, "num_blocks": 20}


@check("LAW-20", "sharded")
def rank_operations_accept_every_integer_type(subject: Subject) -> None:
    config = clamp_to_limits(subject, "sharded", **SIZES)
    ranks = config["head_ranks"] * config["token_ranks"]
    keys, values = random_pair(subject, 20)

    def naming(typed: TypedIntegers) -> Iterator[Observation]:
        cache = typed.new("sharded", **SIZES)
        cache.append(keys, values)
        for name in ("heads", "positions", "block_table", "num_bytes", "read_rank"):
            yield f"{name}({ranks - 1})", typed.call(cache, name, ranks - 1)
        yield f"lose({ranks - 1})", typed.call(cache, "lose", ranks - 1)
        yield f"second call of lose({ranks - 1})", typed.call(cache, "lose", ranks - 1)
        yield "read of a cache that lost a rank", typed.call(cache, "read")

    assert_same_for_integer_types(subject, naming)


# SHARD-04: after a rank is lost, the other ranks keep their tokens.

SEVERAL = ((2, 2), (4, 3), (1, 3), (2, 1))


def assert_ranks_need(run: ShardedFixture, lost: int) -> None:
    """Checks that every operation that needs all ranks, or the lost one, raises RankLost, and that the others are unchanged."""
    keys, values = run.random_tokens(1)
    query = normal_rows(run.subject, min(1, len(run)), *run.row), default_scale(run.subject)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("append", (keys, values)), ("read", ()), ("attend", query), ("truncate", (0,)), ("clear", ()),
        *((name, (lost,)) for name in CALLS_OF_A_RANK),
    ]  # fmt: skip
    tried = 0
    for name, args in calls:
        with suppress(NotOffered):
            with raises("RankLost"):
                getattr(run.cache, name)(*args)
            tried += 1
    if not tried:
        raise NotOffered("an operation that needs all ranks")
    run.look(*CONTENTS, "block_table")


@check("SHARD-04a", "sharded")
def lose_makes_calls_that_need_the_rank_raise(subject: Subject) -> None:
    for config in grids(subject, *SEVERAL):
        ranks = config["head_ranks"] * config["token_ranks"]
        for lost in dict.fromkeys((0, 1, ranks - 1)) if ranks > 1 else ():
            run = ShardedFixture(subject, **config)
            run.append(2 * run.size + 1)
            run.look("block_table")
            run.cache.lose(lost)
            for _ in range(2):  # a second call raises the same error
                assert_ranks_need(run, lost)


@check("SHARD-04b", "sharded")
def append_in_which_a_rank_is_lost_writes_nothing(subject: Subject) -> None:
    """Any rank, with tokens for its own column, for columns before or after it, or for all columns."""
    for config in grids(subject, *SEVERAL):
        turn, ranks = config["block_size"] * config["token_ranks"], config["head_ranks"] * config["token_ranks"]
        for lost in dict.fromkeys((0, 1, ranks // 2, ranks - 1)) if ranks > 1 else ():
            for before, count in ((0, 1), (1, turn), (turn - 1, 2), (turn, 1)):
                run = ShardedFixture(subject, **config)
                run.append(before)
                run.look("block_table")
                run.cache.lose_in_append(lost)
                run.look()
                with raises("RankLost"):
                    run.cache.append(*run.random_tokens(count))
                assert_equal(int(run.cache.length), before, "length after an append in which a rank was lost")
                assert_ranks_need(run, lost)


@check("SHARD-04b", "sharded")
def append_in_which_several_ranks_are_lost_writes_nothing(subject: Subject) -> None:
    run = ShardedFixture(subject, **next(grids(subject, (2, 2), (1, 3), (4, 3))))
    if len(run.ranks) < 3:
        raise NotOffered("three ranks")
    run.append(run.size + 1)
    run.look("block_table")
    lost = run.ranks[0], run.ranks[-1]
    for rank in lost:
        run.cache.lose_in_append(rank)
    with raises("RankLost"):
        run.cache.append(*run.random_tokens(3))
    for rank in lost:
        assert_ranks_need(run, rank)


@check("SHARD-04b", "sharded")
def append_of_numbers_that_are_not_finite_in_which_a_rank_is_lost_writes_nothing(subject: Subject) -> None:
    """Either error is valid, so the rank may or may not be lost after the call. In both cases nothing may be written."""
    for config in grids(subject, *SEVERAL):
        *others, last = range(config["head_ranks"] * config["token_ranks"])
        row = config["num_kv_heads"], config["head_dim"]
        for number in (np.nan, np.inf) if others else ():
            cache = construct(subject, "sharded", **config)
            cache.append(*random_pair(subject, config["block_size"] + 1, *row))
            before = [(cache.block_table(rank), cache.read_rank(rank)) for rank in others]
            cache.lose_in_append(last)
            keys, values = random_pair(subject, config["block_size"], *row)
            keys[-1], values[-1] = number, number
            for pair, errors in (((keys, values), ("RankLost", "NonFinite")), (random_pair(subject, 1, *row), ("RankLost",))):
                with raises(*errors):
                    cache.append(*pair)
                assert_equal(int(cache.length), config["block_size"] + 1, "length after an append in which a rank was to be lost")
                for rank, (table, tokens) in zip(others, before, strict=True):
                    assert_equal(list(cache.block_table(rank)), list(table), f"block table of rank {rank}")
                    assert_pair(cache.read_rank(rank), tokens, f"tokens of rank {rank}")


@check("SHARD-04c", "sharded")
def append_that_raises_another_error_loses_no_rank(subject: Subject) -> None:
    run = ShardedFixture(subject, **next(grids(subject, (2, 2), (2, 1), (1, 3))))
    if len(run.ranks) == 1:
        raise NotOffered("two ranks")
    run.append(run.room)
    run.cache.lose_in_append(1)
    keys, values = run.random_tokens(1)
    with raises("CapacityExceeded"):
        run.cache.append(keys, values)
    with suppress(NotOffered):
        run.cache.truncate(3)
        with raises("ShapeMismatch"):
            run.cache.append(keys[:, :, 1:], values[:, :, 1:])
        if not subject.size("tokens", 0):
            run.append(0)
    run.look()
    if len(run) < run.room:
        run.look("block_table")
        with raises("RankLost"):
            run.cache.append(keys, values)
        run.look(*CONTENTS, "block_table")


@check("SHARD-04d", "sharded")
def calls_that_name_a_rank_that_does_not_exist_raise(subject: Subject) -> None:
    for config in grids(subject, *SEVERAL):
        run, tried = ShardedFixture(subject, **config), 0
        run.append(run.size + 1)
        for name in CALLS_OF_A_RANK:
            for rank in subject.integers(-1, len(run.ranks)):
                with suppress(NotOffered):
                    with raises("RankOutOfRange"):
                        getattr(run.cache, name)(rank)
                    tried += 1
        if not tried:
            raise NotOffered("an operation with a rank as its argument")
        run.look()


# LAW-18: production sizes, with the heads of models on up to 32 ranks and thousands of tokens.

LONG = 4200  # tokens; no multiple of the block size


class LongCache:
    """A cache with generated content. It has no session, because the model is slow with thousands of tokens."""

    def __init__(self, subject: Subject, tokens: int, rows: int, columns: int, size: int, heads: int, dim: int) -> None:
        """The sizes are the nearest allowed ones, with room for `tokens` tokens."""
        wanted = {"block_size": size, "num_kv_heads": heads, "head_dim": dim}
        config = next(grids(subject, (rows, columns), **wanted))
        blocks = -(-tokens // (config["block_size"] * config["token_ranks"]))
        config = next(grids(subject, (rows, columns), **wanted, num_blocks=blocks))
        self.subject, self.config, self.cache = subject, config, construct(subject, "sharded", **config)
        self.layout = Sharded(**config)
        self.row, self.ranks = self.layout.row, self.layout.ranks
        self.room = self.layout.blocks * self.layout.size * self.layout.columns
        self.length = 0

    def append_up_to(self, length: int) -> None:
        """Appends generated content up to a length, or until the cache is full."""
        length = min(length, self.room)
        self.cache.append(*content_pair(0, 0, range(self.length, length), *self.row))
        self.length = length

    def truncate(self, length: int) -> None:
        self.cache.truncate(length)
        self.length = length

    def attend(self, count: int) -> None:
        """Checks attention for random queries of the last `count` tokens."""
        query = normal_rows(self.subject, count, self.row[0] * self.subject.size("group_size", 2), self.row[1])
        tokens, scale = content_pair(0, 0, range(self.length), *self.row), default_scale(self.subject)
        columns = self.layout.columns
        want, bound = expected_attention(self.subject, query, *tokens, scale=scale, causal=True, ranks=columns)
        assert_within(self.cache.attend(query, scale), want, bound, f"attention over {self.length} tokens")

    def check_contents(self) -> None:
        """Checks the content of every rank. The error names the first wrong token."""
        written, cache = WrittenContent(*self.row), self.cache
        written.add_up_to(0, 0, self.length)
        assert_equal(int(cache.length), self.length, "length")
        assert_content(cache.read(), 0, 0, range(self.length), written)
        table = [int(block) for block in cache.block_table(0)]
        entries = -(-self.length // (self.layout.size * self.layout.columns))
        assert_equal((len(table), len(set(table))), (entries, entries), "numbers of entries and of blocks in the table")
        size, columns = self.layout.size, self.layout.columns
        for rank in self.ranks:
            positions = [at for at in range(self.length) if at // size % columns == rank % columns]
            assert_equal([int(each) for each in cache.positions(rank)], positions, f"positions of rank {rank}")
            for part, got in enumerate(cache.read_rank(rank)):
                want = token_content(0, 0, positions, *self.row, part)[:, self.layout.heads_of(rank)]
                wrong = np.argwhere(np.any(np.asarray(got) != want, axis=(1, 2)))[:1].ravel().tolist()
                assert_equal(wrong, [], f"index of the first wrong token of rank {rank} (none if empty), at {self.length} tokens")
            assert_equal([int(block) for block in cache.block_table(rank)], table, f"block table of rank {rank}")


@check("LAW-18", "sharded")
def append_at_every_power_of_two_fills_all_ranks(subject: Subject) -> None:
    cache = LongCache(subject, affordable_tokens(subject, LONG), 2, 3, 16, 2, 64)
    for end in power_of_two_edges(min(affordable_tokens(subject, LONG), cache.room)):
        cache.append_up_to(end)
    cache.check_contents()
    for end in (cache.length * 2 // 3, 257, 255):
        if end < cache.length:
            cache.truncate(end)
            cache.check_contents()


@check("LAW-18", "sharded")
def append_writes_all_copies_of_heads(subject: Subject) -> None:
    length = affordable_tokens(subject, 600, 2)
    for rows, heads in ((8, 4), (8, 8), (16, 2)):
        cache = LongCache(subject, length, rows, 1, 16, heads, 80)
        while cache.length < min(length, cache.room):
            cache.append_up_to(cache.length + 129)
        cache.check_contents()


@check("LAW-18", "sharded")
def heads_and_num_bytes_are_right_on_many_ranks(subject: Subject) -> None:
    """Divided heads, copied heads, and many columns."""
    for rows, columns, heads in ((8, 1, 8), (2, 1, 8), (16, 1, 8), (4, 8, 8), (1, 16, 1)):
        cache = LongCache(subject, affordable_tokens(subject, 300, 5), rows, columns, 16, heads, 64)
        cache.append_up_to(cache.room)
        config = cache.config
        for rank in cache.ranks:
            share = cache.layout.heads_of(rank)
            numbers = 2 * config["num_blocks"] * config["block_size"] * len(share) * config["head_dim"]
            assert_equal([int(head) for head in cache.cache.heads(rank)], share, f"heads of rank {rank}")
            assert_equal(cache.cache.num_bytes(rank), numbers * NUMBER_BYTES[config["dtype"]], f"num_bytes of rank {rank}")


@check("LAW-18", "sharded")
def attend_to_a_long_sequence_on_many_ranks(subject: Subject) -> None:
    length = affordable_tokens(subject, LONG)
    cache = LongCache(subject, length, 2, 8, 16, 2, 64)
    cache.append_up_to(length)
    cache.attend(1)
    cache.attend(min(3, cache.length))


@check("LAW-18", "sharded", real=True)
def append_and_attend_at_the_sizes_of_models_on_eight_ranks(subject: Subject) -> None:
    """Llama 3 8B and 70B, a smaller Qwen 3, and one head: divided heads, copied heads, and tokens divided among columns."""
    length = affordable_tokens(subject, LONG, 4)
    for rows, columns, heads, dim in ((8, 1, 8, 128), (4, 2, 8, 128), (8, 1, 4, 128), (1, 8, 1, 128)):
        cache = LongCache(subject, length, rows, columns, 64, heads, dim)
        for end in (length // 3, length - 2, length - 1, length):
            cache.append_up_to(end)
        cache.check_contents()
        cache.attend(1)
