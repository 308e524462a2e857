"""Checks of LAW-18: a growing buffer that is filled to its last token each time it has grown."""

from collections.abc import Iterator, Sequence

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.content import Written, belongs, pair_of_content
from kvref_conformance.checking.real import affordable, edges
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject


def lanes(streams: Sequence[int], positions: range, written: Written) -> Iterator[NDArray]:
    """Yields the keys and the values [batch, heads, n, dim] that belong at these positions, with one stream per row."""
    pairs = [pair_of_content(stream, 0, positions, written.heads, written.dim) for stream in streams]
    yield from (np.stack([pair[part].transpose(1, 0, 2) for pair in pairs]) for part in (0, 1))


def append(cache: Handle, streams: Sequence[int], positions: range, written: Written) -> None:
    cache.append(*lanes(streams, positions, written))
    for stream in streams:
        written.up_to(stream, 0, positions.stop)


def belong(cache: Handle, streams: Sequence[NDArray | int], count: int, written: Written) -> None:
    """Raises Broken unless row i contains the first `count` tokens of stream i (`streams` can name a stream per position)."""
    keys, values = cache.read()
    for b, stream in enumerate(streams):
        belongs((keys[b].transpose(1, 0, 2), values[b].transpose(1, 0, 2)), stream, 0, range(count), written)


@check("LAW-18", "contiguous")
def buffers_are_filled_to_their_last_token(subject: Subject) -> None:
    for initial, heads, dim in ((16, 2, 96), (100, 1, 128), (256, 1, 64), (1, 3, 80)):
        cache = new(
            subject, "contiguous", num_kv_heads=heads, head_dim=dim, initial_capacity=initial, max_seq_len=8 * initial + 600
        )
        config, at = cache.config, 0
        written = Written(config["num_kv_heads"], config["head_dim"])
        capacity, end = config["initial_capacity"], affordable(subject, config["max_seq_len"], 2)
        while at < end:
            for count in (capacity - at, 1):  # up to the capacity, then one token that makes the buffer grow
                stop = min(at + count, end)
                if stop == at:
                    continue
                append(cache, [0] * config["batch_size"], range(at, stop), written)
                at = stop
                belong(cache, [0], at, written)
            capacity = max(1, 2 * capacity)


@check("LAW-18", "contiguous")
def sequences_of_a_batch_grow_side_by_side(subject: Subject) -> None:
    cache = new(
        subject, "contiguous", batch_size=5, num_kv_heads=4, head_dim=80, initial_capacity=16, max_seq_len=520
    )  # fmt: skip
    config, at = cache.config, 0
    written = Written(config["num_kv_heads"], config["head_dim"])
    for count in (15, 1, 1, 47, 1, 64, 129, 255, 1):
        stop = min(at + count, config["max_seq_len"])
        if count % 2:
            append(cache, range(config["batch_size"]), range(at, stop), written)
        else:
            cache.append_fused(np.stack(list(lanes(range(config["batch_size"]), range(at, stop), written))))
        at = stop
        for stream in range(config["batch_size"]):
            written.up_to(stream, 0, at)
    belong(cache, range(config["batch_size"]), at, written)


@check("LAW-18", "contiguous")
def drafts_come_and_go_at_any_length(subject: Subject) -> None:
    cache = new(subject, "contiguous", num_kv_heads=2, head_dim=96, initial_capacity=16, max_seq_len=600)
    config, at = cache.config, 0
    written = Written(config["num_kv_heads"], config["head_dim"])
    own, another = [0] * config["batch_size"], [1] * config["batch_size"]
    ends = edges(affordable(subject, config["max_seq_len"], 2) - 5)
    for end in ends:
        append(cache, own, range(at, end), written)
        append(cache, another, range(end, end + 5), written)
        cache.truncate(end)
        belong(cache, [0], end, written)
        at = end
    for end in reversed(ends):
        cache.truncate(end)
        belong(cache, [0], end, written)


@check("LAW-18", "contiguous")
def beams_of_many_tokens_go_on_from_each_other(subject: Subject) -> None:
    subject.need(batch_size=2)
    cache = new(subject, "contiguous", batch_size=5, num_kv_heads=4, head_dim=80, initial_capacity=16, max_seq_len=600)
    batch, at = cache.config["batch_size"], 0
    written = Written(cache.config["num_kv_heads"], cache.config["head_dim"])
    streams = np.zeros((batch, 0), int)  # the stream of each row and position
    for time, count in enumerate((15, 2, 110, 2, 126, 2, 255, 1)):
        count = min(count, affordable(subject, cache.config["max_seq_len"], 8) - at)
        own = [time * batch + row for row in range(batch)]
        append(cache, own, range(at, at + count), written)
        streams, at = np.concatenate([streams, np.repeat(np.array(own)[:, None], count, axis=1)], axis=1), at + count
        order = [(3 * row + time) // 2 % batch for row in range(batch)]
        cache.reorder(order)
        streams = streams[order]
        belong(cache, list(streams), at, written)
