"""SHARD-01 to 03: the heads, tokens and blocks of each rank."""

import numpy as np

from kvref_conformance.checking.expect import equal, raises
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import formats_of, refused
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.sharded.known import Known, grids, heads_and_rows
from kvref_conformance.oracle.formats import PLAIN
from kvref_conformance.outcome import NotOffered

PIECES = (1, 2, 5, 1, 3, 1, 4)  # lengths of consecutive appends


@check("SHARD-01abd", "sharded")
def each_row_holds_its_share_or_a_copy(subject: Subject) -> None:
    tried = 0
    for config in heads_and_rows(subject):
        known = Known(subject, **config)
        for count in PIECES:
            known.append(count)
        what = f"of {known.row[0]} heads on {known.rows} rows"
        for rank in known.ranks:
            equal([int(head) for head in known.cache.heads(rank)], known.heads(rank), f"heads of rank {rank} {what}")
        known.look(f"{what}, at {len(known)} tokens")
        tried += 1
    if not tried:
        raise NotOffered("a number of heads that head_ranks divides or is divided by, where its limits do not allow it")


@check("SHARD-01d", "sharded")
def put_together_it_is_the_cache_that_is_not_sharded(subject: Subject) -> None:
    for config in grids(subject):
        known = Known(subject, **config)
        for count in PIECES:
            known.append(count)
            known.look(f"after an append of {count} tokens to a total of {len(known)} on {known.rows} x {known.columns} ranks")


@check("SHARD-01d", "sharded")
def numbers_are_rounded_as_they_would_be_on_one(subject: Subject) -> None:
    for dtype in formats_of(subject, "dtype", *PLAIN):
        known = Known(subject, **next(grids(subject, (4, 3), dtype=dtype)))
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
            known = Known(subject, **config)
            known.append(size * known.columns * 2 + size + 1)
            said = [[int(each) for each in known.cache.positions(rank)] for rank in known.ranks]
            what = f"with block_size {size} on {known.columns} columns"
            for first in known.ranks[:: known.columns]:
                together = sorted(position for columns in said[first : first + known.columns] for position in columns)
                equal(together, list(range(len(known))), f"positions of all ranks of a row, {what}")
            known.look(f"at {len(known)} tokens {what}")


@check("SHARD-02a", "sharded")
def pieces_go_where_the_whole_goes(subject: Subject) -> None:
    """An append may begin and end in any column, at any slot of a block."""
    for config in grids(subject, (2, 3), (1, 4), block_size=subject.size("block_size", 3)):
        turn = config["block_size"] * config["token_ranks"]
        for first in range(1, turn + 1):
            known = Known(subject, **config)
            for count in (first, turn - 1, 1):
                known.append(count)
            known.look(f"after appends of {first}, {turn - 1} and 1 tokens, where one block per column stores {turn} tokens")


@check("SHARD-03a", "sharded")
def every_rank_lists_the_same_blocks(subject: Subject) -> None:
    for config in grids(subject):
        known = Known(subject, **config)
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
        known = Known(subject, **config)
        turn, before = known.size * known.columns, list[int]()
        while len(known) < known.room:
            known.append(turn // 2 + 1)
            table = known.tables(known.ranks, f"at {len(known)} tokens")
            equal(table[: len(before)], before, f"the table entries from before an append, at {len(known)} tokens")
            before = table
        for left in (known.room - 1, known.room - turn - 1, turn + 1, turn, 1):
            known.truncate(min(left, len(known)))
            table = known.tables(known.ranks, f"after truncate to {len(known)} tokens")
            equal(
                table,
                before[: len(table)],
                f"the table after truncate to {len(known)} tokens, compared with its first entries before",
            )


@check("SHARD-03c", "sharded")
def bytes_are_those_of_the_blocks(subject: Subject) -> None:
    for dtype in formats_of(subject, "dtype", *PLAIN):
        for config in grids(subject, (4, 3), (1, 3), (2, 1), (1, 6), dtype=dtype):
            known = Known(subject, **config)
            for count in (0, 1, known.size, known.size * known.columns):
                known.append(count)
                for rank in known.ranks:
                    equal(
                        known.cache.num_bytes(rank),
                        known.num_bytes(rank),
                        f"num_bytes of rank {rank} at {len(known)} tokens in {dtype}",
                    )


@check("SHARD-03de", "sharded")
def what_does_not_fit_is_written_on_no_rank(subject: Subject) -> None:
    for config in grids(subject, (2, 3), (4, 1), (1, 2)):
        known = Known(subject, **config)
        for short in (1, 2, known.size + 1):  # room that is left, in tokens, when more are appended
            known.append(known.room - short - len(known))
            table = known.tables(known.ranks, f"with room for {short} tokens")
            over = known.tokens(short + 1)
            with raises("CapacityExceeded"):
                known.cache.append(*over)
            when = f"after an append of {short + 1} tokens with room for {short} raised CapacityExceeded"
            known.look(when)
            equal(known.tables(known.ranks, when), table, f"the block table {when}")
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
        known = Known(subject, **config)
        for left in (0, 1, known.size, 0, known.room // 2, known.room - 1, 0):
            known.append(known.room)
            known.tables(known.ranks, f"of a full cache, before truncate({left})")
            known.truncate(left)
        known.append(known.room)
        known.look("of a full cache, after several truncations and appends")
        equal(
            np.unique(known.tables(known.ranks, "of a full cache")).tolist(),
            list(range(config["num_blocks"])),
            "the blocks in the table of a full cache",
        )
