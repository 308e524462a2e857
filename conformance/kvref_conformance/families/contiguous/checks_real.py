"""LAW-18: the growing buffer, filled to its last token each time that it has grown."""

import numpy as np

from kvref_conformance.checking.content import Written, belongs, pair_of_content
from kvref_conformance.checking.real import affordable
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new
from kvref_conformance.conversation.subject import Subject


@check("LAW-18", "contiguous")
def buffers_are_filled_to_their_last_token(subject: Subject) -> None:
    for initial, heads, dim in ((16, 2, 96), (100, 1, 128), (256, 1, 64), (1, 3, 80)):
        cache = new(
            subject, "contiguous", num_kv_heads=heads, head_dim=dim, initial_capacity=initial, max_seq_len=8 * initial + 600
        )
        config, at = cache.config, 0
        written = Written(config["num_kv_heads"], config["head_dim"])
        capacity, end = config["initial_capacity"], affordable(subject, config["max_seq_len"], 2)
        while capacity < end:
            for count in (capacity - at, 1):  # to the last token there is room for, and one that makes it grow
                stop = min(at + count, end)
                if stop == at:
                    continue
                rows = [
                    part.transpose(1, 0, 2)[None] for part in pair_of_content(0, 0, range(at, stop), written.heads, written.dim)
                ]
                cache.append(*(np.concatenate([part] * config["batch_size"]) for part in rows))
                at = stop
                keys, values = cache.read()
                belongs((keys[0].transpose(1, 0, 2), values[0].transpose(1, 0, 2)), 0, 0, range(at), written)
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
        pairs = [pair_of_content(b, 0, range(at, stop), written.heads, written.dim) for b in range(config["batch_size"])]
        keys, values = (np.stack([pair[part].transpose(1, 0, 2) for pair in pairs]) for part in (0, 1))
        if count % 2:
            cache.append(keys, values)
        else:
            cache.append_fused(np.stack([keys, values]))
        at = stop
        for stream in range(config["batch_size"]):
            written.up_to(stream, 0, at)
    keys, values = cache.read()
    for b in range(config["batch_size"]):
        belongs((keys[b].transpose(1, 0, 2), values[b].transpose(1, 0, 2)), b, 0, range(at), written)
