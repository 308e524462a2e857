"""SHARD-04: after a rank is lost, the other ranks keep their tokens."""

from contextlib import suppress

import numpy as np

from kvref_conformance.checking.attending import even, normal
from kvref_conformance.checking.expect import equal, raises
from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.sharded.known import Known, grids
from kvref_conformance.outcome import NotOffered

OF_A_RANK = ("read_rank", "heads", "positions", "block_table", "num_bytes", "lose", "lose_in_append")
SEVERAL = ((2, 2), (4, 3), (1, 3), (2, 1))


def held(known: Known, living: list[int], table: list[int], when: str) -> None:
    """Check that the remaining ranks have the same tokens in the same blocks as before."""
    equal(int(known.cache.length), len(known), f"length {when}")
    known.look_at(living, when)
    equal(known.tables(living, when), table, f"the block table {when}")


def refuses(known: Known, lost: int, when: str) -> None:
    """Check that every operation that needs all ranks, or the lost one, raises RankLost."""
    keys, values = known.tokens(1)
    query = normal(known.subject, min(1, len(known)), known.row[0], known.row[1])
    calls = [
        ("append", (keys, values)),
        ("read", ()),
        ("attend", (query, even(known.subject))),
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
            known = Known(subject, **config)
            if lost not in known.ranks or len(known.ranks) == 1:
                continue
            known.append(2 * known.size + 1)
            living = [rank for rank in known.ranks if rank != lost]
            table = known.tables(known.ranks, "before a rank was lost")
            known.cache.lose(lost)
            when = f"after rank {lost} of {len(known.ranks)} was lost"
            held(known, living, table, when)
            for _ in range(2):  # a second call raises the same error
                refuses(known, lost, when)
                held(known, living, table, f"{when} and calls that need it raised RankLost")


@check("SHARD-04b", "sharded")
def an_append_in_which_a_rank_is_lost_is_written_nowhere(subject: Subject) -> None:
    """Any rank, with tokens for its own column, for columns before or after it, or for all columns."""
    for config in grids(subject, *SEVERAL):
        turn, ranks = config["block_size"] * config["token_ranks"], config["head_ranks"] * config["token_ranks"]
        for lost in dict.fromkeys((0, 1, ranks // 2, ranks - 1)) if ranks > 1 else ():
            for before, count in ((0, 1), (1, turn), (turn - 1, 2), (turn, 1)):
                known = Known(subject, **config)
                known.append(before)
                table = known.tables(known.ranks, "before a rank was lost")
                known.cache.lose_in_append(lost)
                known.look("after lose_in_append, before the next append")
                with raises("RankLost"):
                    known.cache.append(*known.tokens(count))
                when = f"after rank {lost} of {ranks} was lost during an append of {count} tokens to {before}"
                held(known, [rank for rank in known.ranks if rank != lost], table, when)
                refuses(known, lost, when)


@check("SHARD-04b", "sharded")
def several_ranks_are_lost_in_one_append(subject: Subject) -> None:
    known = Known(subject, **next(grids(subject, (2, 2), (1, 3), (4, 3))))
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
    held(known, list(known.ranks[1:-1]), table, "after two ranks were lost during an append")


@check("SHARD-04b", "sharded")
def no_number_that_is_not_finite_is_written_where_a_rank_is_lost(subject: Subject) -> None:
    """Either error is valid, so the rank may or may not be lost after the call. In both cases nothing may be written."""
    for config in grids(subject, *SEVERAL):
        ranks = config["head_ranks"] * config["token_ranks"]
        for number in (np.nan, np.inf) if ranks > 1 else ():
            known = Known(subject, **config)
            known.append(known.size + 1)
            table = known.tables(known.ranks, "before a rank was lost")
            known.cache.lose_in_append(ranks - 1)
            keys, values = known.tokens(known.size)
            keys[-1], values[-1] = number, number
            with raises("RankLost", "NonFinite"):
                known.cache.append(keys, values)
            living = list(known.ranks[:-1])
            held(known, living, table, f"after an append of {number}, during which a rank was to be lost, raised an error")
            with raises("RankLost"):
                known.cache.append(*known.tokens(1))
            held(known, living, table, f"after an append of {number} and an append during which a rank was lost")


@check("SHARD-04c", "sharded")
def no_rank_is_lost_in_an_append_that_is_refused(subject: Subject) -> None:
    known = Known(subject, **next(grids(subject, (2, 2), (2, 1), (1, 3))))
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
    held(known, [rank for rank in known.ranks if rank != 1], table, "after rank 1 was lost during an append")


@check("SHARD-04d", "sharded")
def a_rank_that_there_is_not_is_refused(subject: Subject) -> None:
    for config in grids(subject, *SEVERAL):
        known, tried = Known(subject, **config), 0
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
