"""LAW-18: production sizes, with the heads of models on up to 32 ranks and thousands of tokens."""

import numpy as np

from kvref_conformance.checking.content import Written, belongs, content, pair_of_content
from kvref_conformance.checking.expect import equal
from kvref_conformance.checking.real import affordable, edges
from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.sharded.known import Known, grids

LONG = 4200  # tokens; no multiple of the block size


def grown(subject: Subject, tokens: int, rows: int, columns: int, size: int, heads: int, dim: int) -> Known:
    """A cache of these sizes, or the nearest allowed, with room for `tokens` tokens."""
    wanted = {"block_size": size, "num_kv_heads": heads, "head_dim": dim}
    config = next(grids(subject, (rows, columns), **wanted))
    blocks = -(-tokens // (config["block_size"] * config["token_ranks"]))
    return Known(subject, **next(grids(subject, (rows, columns), **wanted, num_blocks=blocks)))


def up_to(known: Known, count: int) -> None:
    """Append generated content up to a position, or until the cache is full."""
    positions = range(len(known), min(count, known.room))
    known.give(*pair_of_content(0, 0, positions, *known.row))


def all_is_there(known: Known) -> None:
    """Check the content of every rank. The error names the first wrong token."""
    written = Written(*known.row)
    written.up_to(0, 0, len(known))
    equal(int(known.cache.length), len(known), "length")
    belongs(known.cache.read(), 0, 0, range(len(known)), written)
    for rank in known.ranks:
        positions, heads = known.positions(rank), known.heads(rank)
        equal([int(each) for each in known.cache.positions(rank)], positions, f"positions of rank {rank} at {len(known)} tokens")
        for part, got in enumerate(known.cache.read_rank(rank)):
            want = content(0, 0, positions, *known.row, part)[:, heads]
            wrong = np.argwhere(np.any(np.asarray(got) != want, axis=(1, 2)))[:1].ravel().tolist()
            equal(wrong, [], f"index of the first wrong token of rank {rank} (none if empty), at {len(known)} tokens")
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
            equal([int(head) for head in known.cache.heads(rank)], known.heads(rank), f"heads {when}")
            equal(known.cache.num_bytes(rank), known.num_bytes(rank), f"num_bytes {when}")


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
