"""Checks of FMT-ROT: a cache in rotated formats."""

from collections.abc import Iterator

import numpy as np

from kvref_conformance.checking.attending import exact, normal
from kvref_conformance.checking.expect import pair, within
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, formats_of, pair_of_tokens
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.quantized.checks import LOUD, reads_back
from kvref_conformance.families.quantized.stream import QuantizedStream
from kvref_conformance.oracle.formats import ROTATED, group_of
from kvref_conformance.oracle.rotated import block_of
from kvref_conformance.outcome import NotOffered

DIM = 64


def each(subject: Subject) -> Iterator[QuantizedStream]:
    """Yields a cache of one layer per rotated format. Raises NotOffered if no allowed head_dim has a block to rotate."""
    dim, found = subject.size("head_dim", DIM), formats_of(subject, "format", *ROTATED)
    found = [name for name in found if dim % group_of(name) == 0 and block_of(dim) > 1]
    if not found:
        raise NotOffered("a head_dim with a block to rotate")
    for name in found:
        stream = QuantizedStream(subject, num_layers=1, format=name, head_dim=DIM)
        at_least(stream.cache, capacity=4)
        yield stream


def tokens(subject: Subject, stream: QuantizedStream, count: int) -> list[np.ndarray]:
    return list(pair_of_tokens(subject, count, stream.config["num_kv_heads"], stream.config["head_dim"]))


@check("FMT-ROT-04", "quantized")
def no_head_is_rotated_with_another(subject: Subject) -> None:
    subject.need(num_kv_heads=2)
    for stream in each(subject):
        keys, values = tokens(subject, stream, 3)
        stream.give(keys, values)
        before, beside = stream.read(), stream.fresh(num_layers=1, format=stream.config["format"], head_dim=DIM)
        loud = [part * np.where(np.arange(part.shape[1])[:, None] == 0, LOUD, np.float32(1)) for part in (keys, values)]
        beside.give(*loud)
        (keys_beside, values_beside), (keys_alone, values_alone) = beside.read(), before
        alone = keys_alone[:, 1:], values_alone[:, 1:]
        pair(
            (keys_beside[:, 1:], values_beside[:, 1:]),
            alone,
            f"heads of {stream.config['format']} tokens next to a head of large values",
        )
        reads_back(stream, keys, values, f"{stream.config['format']} tokens")


@check("FMT-ROT-07a", "quantized")
def rotated_tokens_read_back_as_their_format_says(subject: Subject) -> None:
    for stream in each(subject):
        keys, values = tokens(subject, stream, 4)
        stream.give(keys, values)
        reads_back(stream, keys, values, f"4 {stream.config['format']} tokens")
        stream.cache.truncate(2)
        keys[2:], values[2:] = tokens(subject, stream, 2)
        stream.give(keys[2:], values[2:])
        reads_back(stream, keys, values, f"{stream.config['format']} tokens, two of which replace removed ones")


@check("FMT-ROT-07b", "quantized")
def attention_over_rotated_tokens_is_over_what_they_read_as(subject: Subject) -> None:
    for stream in each(subject):
        stream.give(*tokens(subject, stream, 4))
        heads, dim = stream.config["num_kv_heads"], stream.config["head_dim"]
        query, scale = normal(subject, 1, heads * subject.size("group_size", 2), dim), 2.5 / dim
        want, bound = exact(subject, query, *stream.read(), scale=scale, rotated=True)
        within(stream.cache.attend(0, query, scale), want, bound, f"attention over {stream.config['format']} tokens")
