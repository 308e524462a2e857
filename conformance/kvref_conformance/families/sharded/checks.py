"""SHARD-01 to 03: the heads, tokens and blocks of each rank."""

from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.sharded.fixture import ShardedFixture, grids, heads_and_rows
from kvref_conformance.oracle.formats import PLAIN
from kvref_conformance.outcome import NotOffered
from kvref_conformance.testlib.assertions import (
    LOUD,
    LOUD_SCALE,
    assert_equal,
    assert_pair,
    assert_same,
    assert_within,
    default_scale,
    expected_attention,
    may_raise,
    normal,
    raises,
)
from kvref_conformance.testlib.fixtures import (
    at_least,
    clamp_to_limits,
    construct,
    formats_of,
    pair_of_tokens,
    refused,
    round_to_input_dtype,
)
from kvref_conformance.testlib.integer_types import Seen, TypedIntegers, the_same_in_any_type
from kvref_conformance.testlib.production_sizes import affordable, edges
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.tagged_content import WrittenContent, belongs, content, pair_of_content

PIECES = (1, 2, 5, 1, 3, 1, 4)  # lengths of consecutive appends


@check("SHARD-01abd", "sharded")
def each_row_holds_its_share_or_a_copy(subject: Subject) -> None:
    tried = 0
    for config in heads_and_rows(subject):
        known = ShardedFixture(subject, **config)
        for count in PIECES:
            known.append(count)
        what = f"of {known.row[0]} heads on {known.rows} rows"
        for rank in known.ranks:
            assert_equal([int(head) for head in known.cache.heads(rank)], known.heads(rank), f"heads of rank {rank} {what}")
        known.look(f"{what}, at {len(known)} tokens")
        tried += 1
    if not tried:
        raise NotOffered("a number of heads that head_ranks divides or is divided by, where its limits do not allow it")


@check("SHARD-01d", "sharded")
def put_together_it_is_the_cache_that_is_not_sharded(subject: Subject) -> None:
    for config in grids(subject):
        known = ShardedFixture(subject, **config)
        for count in PIECES:
            known.append(count)
            known.look(f"after an append of {count} tokens to a total of {len(known)} on {known.rows} x {known.columns} ranks")


@check("SHARD-01d", "sharded")
def numbers_are_rounded_as_they_would_be_on_one(subject: Subject) -> None:
    for dtype in formats_of(subject, "dtype", *PLAIN):
        known = ShardedFixture(subject, **next(grids(subject, (4, 3), dtype=dtype)))
        known.append(9)
        known.append(2)
        known.look(f"in {dtype}")


@check("SHARD-01c", "sharded")
def heads_that_no_share_comes_of_are_refused(subject: Subject) -> None:
    tried = 0
    for heads, rows in ((2, 3), (3, 2), (4, 6), (6, 4), (3, 5)):
        if subject.size("num_kv_heads", heads) == heads and subject.size("head_ranks", rows) == rows:
            refused(subject, "sharded", num_kv_heads=heads, head_ranks=rows)
            tried += 1
    if not tried:
        raise NotOffered("a number of heads and head_ranks, neither of which divides the other, where its limits do not allow it")


@check("SHARD-02a", "sharded")
def each_token_lies_in_one_column(subject: Subject) -> None:
    for size in dict.fromkeys(subject.size("block_size", wanted) for wanted in (1, 2, 3, 5)):
        for config in grids(subject, (2, 3), (1, 2), (4, 4), block_size=size):
            known = ShardedFixture(subject, **config)
            known.append(size * known.columns * 2 + size + 1)
            said = [[int(each) for each in known.cache.positions(rank)] for rank in known.ranks]
            what = f"with block_size {size} on {known.columns} columns"
            for first in known.ranks[:: known.columns]:
                together = sorted(position for columns in said[first : first + known.columns] for position in columns)
                assert_equal(together, list(range(len(known))), f"positions of all ranks of a row, {what}")
            known.look(f"at {len(known)} tokens {what}")


@check("SHARD-02a", "sharded")
def pieces_go_where_the_whole_goes(subject: Subject) -> None:
    """An append may begin and end in any column, at any slot of a block."""
    for config in grids(subject, (2, 3), (1, 4), block_size=subject.size("block_size", 3)):
        turn = config["block_size"] * config["token_ranks"]
        for first in range(1, turn + 1):
            known = ShardedFixture(subject, **config)
            for count in (first, turn - 1, 1):
                known.append(count)
            known.look(f"after appends of {first}, {turn - 1} and 1 tokens, where one block per column stores {turn} tokens")


@check("SHARD-03a", "sharded")
def every_rank_lists_the_same_blocks(subject: Subject) -> None:
    for config in grids(subject):
        known = ShardedFixture(subject, **config)
        turn = known.size * known.columns
        known.tables(known.ranks, "of a new cache")
        for count, left in ((1, 1), (turn, turn), (turn - 1, turn - 1), (2 * turn + 1, 0), (turn + 1, turn), (turn, turn + 1)):
            known.append(count)
            known.tables(known.ranks, f"at {len(known)} tokens, where one block per column stores {turn} tokens")
            known.truncate(min(left, len(known)))
            known.tables(known.ranks, f"after truncate to {len(known)} tokens")
        known.look(f"at {len(known)} tokens after several appends and truncations")
        known.cache.clear()
        known.keys, known.values = known.tokens(0)
        known.tables(known.ranks, "after clear")


@check("SHARD-03b", "sharded")
def blocks_that_hold_tokens_stay_where_they_are(subject: Subject) -> None:
    for config in grids(subject, (4, 3), (1, 2)):
        known = ShardedFixture(subject, **config)
        turn, before = known.size * known.columns, list[int]()
        while len(known) < known.room:
            known.append(turn // 2 + 1)
            table = known.tables(known.ranks, f"at {len(known)} tokens")
            assert_equal(table[: len(before)], before, f"the table entries from before an append, at {len(known)} tokens")
            before = table
        for left in (known.room - 1, known.room - turn - 1, turn + 1, turn, 1):
            known.truncate(min(left, len(known)))
            table = known.tables(known.ranks, f"after truncate to {len(known)} tokens")
            assert_equal(
                table,
                before[: len(table)],
                f"the table after truncate to {len(known)} tokens, compared with its first entries before",
            )


@check("SHARD-03c", "sharded")
def bytes_are_those_of_the_blocks(subject: Subject) -> None:
    for dtype in formats_of(subject, "dtype", *PLAIN):
        for config in grids(subject, (4, 3), (1, 3), (2, 1), (1, 6), dtype=dtype):
            known = ShardedFixture(subject, **config)
            for count in (0, 1, known.size, known.size * known.columns):
                known.append(count)
                for rank in known.ranks:
                    assert_equal(
                        known.cache.num_bytes(rank),
                        known.num_bytes(rank),
                        f"num_bytes of rank {rank} at {len(known)} tokens in {dtype}",
                    )


@check("SHARD-03de", "sharded")
def what_does_not_fit_is_written_on_no_rank(subject: Subject) -> None:
    for config in grids(subject, (2, 3), (4, 1), (1, 2)):
        known = ShardedFixture(subject, **config)
        for short in (1, 2, known.size + 1):  # room that is left, in tokens, when more are appended
            known.append(known.room - short - len(known))
            table = known.tables(known.ranks, f"with room for {short} tokens")
            over = known.tokens(short + 1)
            with raises("CapacityExceeded"):
                known.cache.append(*over)
            when = f"after an append of {short + 1} tokens with room for {short} raised CapacityExceeded"
            known.look(when)
            assert_equal(known.tables(known.ranks, when), table, f"the block table {when}")
            known.append(short)
            known.look("of a full cache")
            with raises("CapacityExceeded"):
                known.cache.append(*(part[:1] for part in over))
            known.look("of a full cache, after an append of one token raised CapacityExceeded")
            known.truncate(known.room // 2)


@check("SHARD-03d", "sharded")
def room_that_came_back_is_room(subject: Subject) -> None:
    """The cache is filled repeatedly, so that a block that a rank did not free makes an append fail."""
    for config in grids(subject, (2, 3), (4, 1)):
        known = ShardedFixture(subject, **config)
        for left in (0, 1, known.size, 0, known.room // 2, known.room - 1, 0):
            known.append(known.room)
            known.tables(known.ranks, f"of a full cache, before truncate({left})")
            known.truncate(left)
        known.append(known.room)
        known.look("of a full cache, after several truncations and appends")
        assert_equal(
            np.unique(known.tables(known.ranks, "of a full cache")).tolist(),
            list(range(config["num_blocks"])),
            "the blocks in the table of a full cache",
        )


# SHARD-02: attention merged from the partial results of all columns.


@check("SHARD-02bc", "sharded")
def attention_is_that_of_all_tokens(subject: Subject) -> None:
    """Every length up to two blocks per column, which includes one token, empty columns and partly filled blocks."""
    for config in grids(subject):
        known = ShardedFixture(subject, **config)
        turn = known.size * known.columns
        while len(known) < min(2 * turn + 1, known.room):
            known.append(1)
            known.attends(1, f"at {len(known)} tokens")
        for count in (2, turn, len(known), 0):
            known.attends(min(count, len(known)), f"at {len(known)} tokens")


@check("SHARD-02b", "sharded")
def each_query_head_reads_its_own_kv_head(subject: Subject) -> None:
    """Group sizes of models: 4 and 8 (Llama), and 7 (Qwen), which the number of head copies does not divide."""
    for config in heads_and_rows(subject):
        known = ShardedFixture(subject, **config)
        known.append(7)
        for group in dict.fromkeys(subject.size("group_size", wanted) for wanted in (1, 2, 3, 4, 7, 8)):
            known.attends(2, f"of {known.row[0]} heads on {known.rows} rows, {group} query heads each", group)


@check("SHARD-02b", "sharded")
def the_column_that_has_the_token_decides(subject: Subject) -> None:
    """One token has almost all the weight, at every position, so the partial results of other columns hardly count."""
    scale = default_scale(subject) * LOUD_SCALE
    for config in grids(subject, (1, 3), (2, 2), (4, 3)):
        for place in range(config["block_size"] * config["token_ranks"] + 1):
            known = ShardedFixture(subject, **config)
            keys, values = known.tokens(min(known.room, config["block_size"] * config["token_ranks"] + 2))
            keys[:] = 0
            keys[place % len(keys)] = LOUD
            known.give(keys, values)
            query = np.ones((1, known.row[0] * subject.size("group_size", 2), known.row[1]), np.float32)
            known.attends_to(query, scale, f"with almost all weight on position {place % len(keys)} of {len(keys)}")
            known.attends_to(-query, scale, f"with almost no weight on position {place % len(keys)} of {len(keys)}")


@check("SHARD-02b", "sharded")
def large_scores_do_not_overflow(subject: Subject) -> None:
    """Scores are large, and positive in one column and negative in another."""
    for config in grids(subject, (1, 3), (2, 2)):
        known = ShardedFixture(subject, **config)
        keys, values = known.tokens(min(known.room, 2 * known.size * known.columns))
        keys = round_to_input_dtype(subject, np.sign(keys) * 30)
        known.give(keys, values)
        query = normal(subject, 3 if len(known) > 2 else 1, known.row[0] * subject.size("group_size", 2), known.row[1]) * 30
        known.attends_to(round_to_input_dtype(subject, query), 1.0, "with large scores")


@check("SHARD-02bc", "sharded")
def a_query_sees_no_later_token_of_any_column(subject: Subject) -> None:
    """Later tokens have larger scores and other values, so attending to one changes the result visibly."""
    scale = default_scale(subject) * LOUD_SCALE
    for config in grids(subject, (2, 3), (1, 2), (1, 4)):
        known = ShardedFixture(subject, **config)
        keys, values = known.tokens(min(known.room, 2 * known.size * known.columns + 1))
        keys[:] = (np.arange(len(keys), dtype=np.float32) / 4)[:, None, None]
        known.give(round_to_input_dtype(subject, keys), values)
        heads = known.row[0] * subject.size("group_size", 2)
        for count in (2, known.size + 1, len(known)):
            query = np.ones((min(count, len(known)), heads, known.row[1]), np.float32)
            known.attends_to(query, scale, f"of {len(query)} queries, with scores that grow with the position")


@check("SHARD-02c", "sharded")
def what_is_not_seen_has_no_part(subject: Subject) -> None:
    """The last token is not finite. It must not affect the query before it, in any column."""
    for config in grids(subject, (1, 3), (2, 2)):
        for length in range(2, config["block_size"] * config["token_ranks"] + 2):
            known = ShardedFixture(subject, **config)
            known.append(min(length, known.room) - 1)
            keys, values = known.tokens(1)
            values[:] = np.nan
            taken = False
            with may_raise("NonFinite"):
                known.cache.append(keys, values)
                taken = True
            if not taken:
                raise NotOffered("append of a token that is not finite")
            query = normal(subject, 2, known.row[0], known.row[1])
            want, bound = expected_attention(
                subject, query[:1], known.keys, known.values, scale=default_scale(subject), causal=True, ranks=known.columns
            )
            got = known.cache.attend(query, default_scale(subject))[:1]
            assert_within(got, want, bound, f"attention of the query before a NaN at position {len(known)}")


@check("SHARD-02b", "sharded")
def heads_stand_side_by_side(subject: Subject) -> None:
    """With one column nothing is merged, so each head's result is bit for bit independent of the other heads' queries."""
    config = clamp_to_limits(subject, "sharded", token_ranks=1)
    if config["token_ranks"] != 1 or config["num_kv_heads"] == 1:
        raise NotOffered("several heads on one column of ranks")
    known = ShardedFixture(subject, **config)
    known.append(9)
    group = subject.size("group_size", 2)
    query = normal(subject, 2, known.row[0] * group, known.row[1])
    got = known.cache.attend(query, default_scale(subject))
    for head in range(known.row[0]):
        own = slice(head * group, (head + 1) * group)
        alone = np.zeros_like(query)
        alone[:, own] = query[:, own]
        assert_same(
            known.cache.attend(alone, default_scale(subject))[:, own],
            got[:, own],
            f"attention of kv head {head} with zero queries for the other heads, compared with all queries",
        )


@check("SHARD-02d", "sharded")
def more_queries_than_tokens_are_refused(subject: Subject) -> None:
    for config in grids(subject, (2, 3), (1, 2)):
        known = ShardedFixture(subject, **config)
        query = normal(subject, 5, known.row[0], known.row[1])
        for count in (0, 1, 3):
            known.append(count - len(known))
            with raises("PositionOutOfRange"):
                known.cache.attend(query[: count + 1], default_scale(subject))
            known.attends(count, f"at {count} tokens")


# EDIT: `truncate` and `clear` have the same effect on every rank.

WANTED = ((2, 3), (4, 1), (1, 2))


@check("EDIT-01ac", "sharded")
def the_first_tokens_stay_on_every_rank(subject: Subject) -> None:
    for config in grids(subject, *WANTED):
        known = ShardedFixture(subject, **config)
        turn = known.size * known.columns
        known.append(2 * turn + 1)
        for length in dict.fromkeys((len(known), 2 * turn, 2 * turn - 1, turn + 1, turn, known.size + 1, known.size, 1, 0)):
            if length <= len(known):
                known.truncate(length)
                known.look(f"after truncate to {length} tokens")


@check("EDIT-02ab", "sharded")
def no_more_tokens_stay_than_there_are(subject: Subject) -> None:
    for config in grids(subject, *WANTED):
        known = ShardedFixture(subject, **config)
        known.append(5)
        for length in subject.integers(6, max(6, known.room), known.room + 1, -1, -5):
            with raises("PositionOutOfRange"):
                known.cache.truncate(length)
            known.look(f"after truncate({length}) of {len(known)} tokens raised PositionOutOfRange")
        known.truncate(len(known))
        known.look("after truncate to the current length")


@check("EDIT-03", "sharded")
def what_follows_is_as_if_nothing_had_gone(subject: Subject) -> None:
    for config in grids(subject, *WANTED):
        known = ShardedFixture(subject, **config)
        turn = known.size * known.columns
        known.append(known.size + 1)
        for draft, back, more in ((turn, turn, 1), (3, 2, 2), (known.size, known.size + 1, turn), (1, 1, 1)):
            known.append(draft)
            known.truncate(max(0, len(known) - back))
            known.append(more)
            never = construct(subject, "sharded", **config)
            never.append(known.keys, known.values)
            when = f"after an append of {draft}, a truncation by {back} and an append of {more}"
            assert_pair(known.cache.read(), never.read(), f"tokens {when}, compared with a cache without that draft")
            known.look(when)


# LAW-20: a law in the form that applies to this family only.

SIZES = {"token_ranks": 2, "block_size": 8, "num_blocks": 20}


@check("LAW-20", "sharded")
def tokens_go_in_any_type(subject: Subject) -> None:
    keys, values = pair_of_tokens(subject, 110)

    def going_back(typed: TypedIntegers) -> Iterator[Seen]:
        cache = typed.new("sharded", **SIZES)
        config = cache.config
        at_least(cache, num_blocks=-(-160 // (config["block_size"] * config["token_ranks"])))
        cache.append(keys, values)
        for time in range(3):
            yield f"truncate(100), call {time + 1}", typed.call(cache, "truncate", 100)
            cache.append(keys[:60], values[:60])
            yield f"length after an append of 60, call {time + 1}", cache.length
        yield "160 tokens", typed.call(cache, "read")

    the_same_in_any_type(subject, going_back)


@check("LAW-20", "sharded")
def ranks_are_named_in_any_type(subject: Subject) -> None:
    config = clamp_to_limits(subject, "sharded", **SIZES)
    ranks = config["head_ranks"] * config["token_ranks"]
    keys, values = pair_of_tokens(subject, 20)

    def naming(typed: TypedIntegers) -> Iterator[Seen]:
        cache = typed.new("sharded", **SIZES)
        cache.append(keys, values)
        for name in ("heads", "positions", "block_table", "num_bytes", "read_rank"):
            yield f"{name}({ranks - 1})", typed.call(cache, name, ranks - 1)
        yield f"lose({ranks - 1})", typed.call(cache, "lose", ranks - 1)
        yield f"second call of lose({ranks - 1})", typed.call(cache, "lose", ranks - 1)
        yield "read of a cache that lost a rank", typed.call(cache, "read")

    the_same_in_any_type(subject, naming)


# SHARD-04: after a rank is lost, the other ranks keep their tokens.

OF_A_RANK = ("read_rank", "heads", "positions", "block_table", "num_bytes", "lose", "lose_in_append")
SEVERAL = ((2, 2), (4, 3), (1, 3), (2, 1))


def assert_contents_unchanged(known: ShardedFixture, living: list[int], table: list[int], when: str) -> None:
    """Check that the remaining ranks have the same tokens in the same blocks as before."""
    assert_equal(int(known.cache.length), len(known), f"length {when}")
    known.look_at(living, when)
    assert_equal(known.tables(living, when), table, f"the block table {when}")


def refuses(known: ShardedFixture, lost: int, when: str) -> None:
    """Check that every operation that needs all ranks, or the lost one, raises RankLost."""
    keys, values = known.tokens(1)
    query = normal(known.subject, min(1, len(known)), known.row[0], known.row[1])
    calls = [
        ("append", (keys, values)),
        ("read", ()),
        ("attend", (query, default_scale(known.subject))),
        ("truncate", (0,)),
        ("clear", ()),
    ]
    calls += [(name, (lost,)) for name in OF_A_RANK]
    tried = 0
    for name, args in calls:
        try:
            with raises("RankLost"):
                getattr(known.cache, name)(*args)
            tried += 1
        except NotOffered:
            continue
    if not tried:
        raise NotOffered("an operation that needs all ranks")


@check("SHARD-04a", "sharded")
def a_rank_that_is_lost_is_said_to_be(subject: Subject) -> None:
    for config in grids(subject, *SEVERAL):
        for lost in dict.fromkeys((0, 1, config["head_ranks"] * config["token_ranks"] - 1)):
            known = ShardedFixture(subject, **config)
            if lost not in known.ranks or len(known.ranks) == 1:
                continue
            known.append(2 * known.size + 1)
            living = [rank for rank in known.ranks if rank != lost]
            table = known.tables(known.ranks, "before a rank was lost")
            known.cache.lose(lost)
            when = f"after rank {lost} of {len(known.ranks)} was lost"
            assert_contents_unchanged(known, living, table, when)
            for _ in range(2):  # a second call raises the same error
                refuses(known, lost, when)
                assert_contents_unchanged(known, living, table, f"{when} and calls that need it raised RankLost")


@check("SHARD-04b", "sharded")
def an_append_in_which_a_rank_is_lost_is_written_nowhere(subject: Subject) -> None:
    """Any rank, with tokens for its own column, for columns before or after it, or for all columns."""
    for config in grids(subject, *SEVERAL):
        turn, ranks = config["block_size"] * config["token_ranks"], config["head_ranks"] * config["token_ranks"]
        for lost in dict.fromkeys((0, 1, ranks // 2, ranks - 1)) if ranks > 1 else ():
            for before, count in ((0, 1), (1, turn), (turn - 1, 2), (turn, 1)):
                known = ShardedFixture(subject, **config)
                known.append(before)
                table = known.tables(known.ranks, "before a rank was lost")
                known.cache.lose_in_append(lost)
                known.look("after lose_in_append, before the next append")
                with raises("RankLost"):
                    known.cache.append(*known.tokens(count))
                when = f"after rank {lost} of {ranks} was lost during an append of {count} tokens to {before}"
                assert_contents_unchanged(known, [rank for rank in known.ranks if rank != lost], table, when)
                refuses(known, lost, when)


@check("SHARD-04b", "sharded")
def several_ranks_are_lost_in_one_append(subject: Subject) -> None:
    known = ShardedFixture(subject, **next(grids(subject, (2, 2), (1, 3), (4, 3))))
    if len(known.ranks) < 3:
        raise NotOffered("three ranks")
    known.append(known.size + 1)
    table = known.tables(known.ranks, "before a rank was lost")
    lost = [0, len(known.ranks) - 1]
    for rank in lost:
        known.cache.lose_in_append(rank)
    with raises("RankLost"):
        known.cache.append(*known.tokens(3))
    for rank in lost:
        refuses(known, rank, "after two ranks were lost during an append")
    assert_contents_unchanged(known, list(known.ranks[1:-1]), table, "after two ranks were lost during an append")


@check("SHARD-04b", "sharded")
def no_number_that_is_not_finite_is_written_where_a_rank_is_lost(subject: Subject) -> None:
    """Either error is valid, so the rank may or may not be lost after the call. In both cases nothing may be written."""
    for config in grids(subject, *SEVERAL):
        ranks = config["head_ranks"] * config["token_ranks"]
        for number in (np.nan, np.inf) if ranks > 1 else ():
            known = ShardedFixture(subject, **config)
            known.append(known.size + 1)
            table = known.tables(known.ranks, "before a rank was lost")
            known.cache.lose_in_append(ranks - 1)
            keys, values = known.tokens(known.size)
            keys[-1], values[-1] = number, number
            with raises("RankLost", "NonFinite"):
                known.cache.append(keys, values)
            living = list(known.ranks[:-1])
            assert_contents_unchanged(
                known, living, table, f"after an append of {number}, during which a rank was to be lost, raised an error"
            )
            with raises("RankLost"):
                known.cache.append(*known.tokens(1))
            assert_contents_unchanged(
                known, living, table, f"after an append of {number} and an append during which a rank was lost"
            )


@check("SHARD-04c", "sharded")
def no_rank_is_lost_in_an_append_that_is_refused(subject: Subject) -> None:
    known = ShardedFixture(subject, **next(grids(subject, (2, 2), (2, 1), (1, 3))))
    if len(known.ranks) == 1:
        raise NotOffered("two ranks")
    known.append(known.room)
    known.cache.lose_in_append(1)
    keys, values = known.tokens(1)
    with raises("CapacityExceeded"):
        known.cache.append(keys, values)
    with suppress(NotOffered):
        known.truncate(3)
        with raises("ShapeMismatch"):
            known.cache.append(keys[:, :, 1:], values[:, :, 1:])
        if not subject.size("tokens", 0):
            known.cache.append(*known.tokens(0))
    known.look("after lose_in_append and appends that raised other errors or had 0 tokens")
    if len(known) == known.room:
        return
    table = known.tables(known.ranks, "before a rank was lost")
    with raises("RankLost"):
        known.cache.append(keys, values)
    assert_contents_unchanged(known, [rank for rank in known.ranks if rank != 1], table, "after rank 1 was lost during an append")


@check("SHARD-04d", "sharded")
def a_rank_that_there_is_not_is_refused(subject: Subject) -> None:
    for config in grids(subject, *SEVERAL):
        known, tried = ShardedFixture(subject, **config), 0
        known.append(known.size + 1)
        for name in OF_A_RANK:
            for rank in subject.integers(-1, len(known.ranks)):
                try:
                    with raises("RankOutOfRange"):
                        getattr(known.cache, name)(rank)
                    tried += 1
                except NotOffered:
                    continue
        if not tried:
            raise NotOffered("an operation with a rank as its argument")
        known.look("after calls with an invalid rank raised RankOutOfRange")


# LAW-18: production sizes, with the heads of models on up to 32 ranks and thousands of tokens.

LONG = 4200  # tokens; no multiple of the block size


def grown(subject: Subject, tokens: int, rows: int, columns: int, size: int, heads: int, dim: int) -> ShardedFixture:
    """A cache of these sizes, or the nearest allowed, with room for `tokens` tokens."""
    wanted = {"block_size": size, "num_kv_heads": heads, "head_dim": dim}
    config = next(grids(subject, (rows, columns), **wanted))
    blocks = -(-tokens // (config["block_size"] * config["token_ranks"]))
    return ShardedFixture(subject, **next(grids(subject, (rows, columns), **wanted, num_blocks=blocks)))


def up_to(known: ShardedFixture, count: int) -> None:
    """Append generated content up to a position, or until the cache is full."""
    positions = range(len(known), min(count, known.room))
    known.give(*pair_of_content(0, 0, positions, *known.row))


def all_is_there(known: ShardedFixture) -> None:
    """Check the content of every rank. The error names the first wrong token."""
    written = WrittenContent(*known.row)
    written.up_to(0, 0, len(known))
    assert_equal(int(known.cache.length), len(known), "length")
    belongs(known.cache.read(), 0, 0, range(len(known)), written)
    for rank in known.ranks:
        positions, heads = known.positions(rank), known.heads(rank)
        assert_equal(
            [int(each) for each in known.cache.positions(rank)], positions, f"positions of rank {rank} at {len(known)} tokens"
        )
        for part, got in enumerate(known.cache.read_rank(rank)):
            want = content(0, 0, positions, *known.row, part)[:, heads]
            wrong = np.argwhere(np.any(np.asarray(got) != want, axis=(1, 2)))[:1].ravel().tolist()
            assert_equal(wrong, [], f"index of the first wrong token of rank {rank} (none if empty), at {len(known)} tokens")
    known.tables(known.ranks, f"at {len(known)} tokens")


@check("LAW-18", "sharded")
def tokens_are_dealt_out_past_every_power_of_two(subject: Subject) -> None:
    length = affordable(subject, LONG)
    known = grown(subject, length, 2, 3, 16, 2, 64)
    for end in edges(min(length, known.room)):
        up_to(known, end)
    all_is_there(known)
    for end in (len(known) * 2 // 3, 257, 255):
        if end < len(known):
            known.truncate(end)
            all_is_there(known)


@check("LAW-18", "sharded")
def copies_of_heads_are_all_written(subject: Subject) -> None:
    length = affordable(subject, 600, 2)
    for rows, heads in ((8, 4), (8, 8), (16, 2)):
        known = grown(subject, length, rows, 1, 16, heads, 80)
        while len(known) < min(length, known.room):
            up_to(known, len(known) + 129)
        all_is_there(known)


@check("LAW-18", "sharded")
def what_each_of_many_ranks_says_that_it_has(subject: Subject) -> None:
    """Heads and bytes per rank, for divided heads, copied heads and many columns."""
    for rows, columns, heads in ((8, 1, 8), (2, 1, 8), (16, 1, 8), (4, 8, 8), (1, 16, 1)):
        known = grown(subject, affordable(subject, 300, 5), rows, columns, 16, heads, 64)
        up_to(known, known.room)
        for rank in known.ranks:
            when = f"of rank {rank} on {known.rows} x {known.columns} ranks, at {len(known)} tokens"
            assert_equal([int(head) for head in known.cache.heads(rank)], known.heads(rank), f"heads {when}")
            assert_equal(known.cache.num_bytes(rank), known.num_bytes(rank), f"num_bytes {when}")


@check("LAW-18", "sharded")
def a_long_sequence_is_attended_to_on_many_ranks(subject: Subject) -> None:
    length = affordable(subject, LONG)
    known = grown(subject, length, 2, 8, 16, 2, 64)
    up_to(known, length)
    known.attends(1, f"of {len(known)} tokens")
    known.attends(min(3, len(known)), f"of {len(known)} tokens")


@check("LAW-18", "sharded", real=True)
def heads_of_models_lie_on_eight_ranks(subject: Subject) -> None:
    """Llama 3 8B and 70B, a smaller Qwen 3, and one head: divided heads, copied heads, and tokens divided among columns."""
    length = affordable(subject, LONG, 4)
    for rows, columns, heads, dim in ((8, 1, 8, 128), (4, 2, 8, 128), (8, 1, 4, 128), (1, 8, 1, 128)):
        known = grown(subject, length, rows, columns, 64, heads, dim)
        for end in (length // 3, length - 2, length - 1, length):
            up_to(known, end)
        all_is_there(known)
        known.attends(1, f"of {len(known)} tokens")
