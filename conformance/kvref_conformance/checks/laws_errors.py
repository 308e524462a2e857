"""LAW-01, 10, 11, 12: wrong use raises its own error, and leaves every observable as it was."""

from contextlib import suppress
from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import equal, pair, raises, reads
from kvref_conformance.checking.registry import CACHES, check, check_each
from kvref_conformance.checking.setup import DIM, HEADS, SMALL, batch_major, new, pair_of_tokens, tokens
from kvref_conformance.checking.streams import Stream
from kvref_conformance.checks.laws_streams import filled, same_observables
from kvref_conformance.drivers.in_process import Subject
from kvref_conformance.outcome import NotOffered

Bad = tuple[str, str, tuple[Any, ...]]  # the error's kind, and the method and arguments that must raise it


def wrong_shapes(stream: Stream) -> list[tuple[NDArray, NDArray]]:
    """Keys and values no cache of HEADS x DIM may take."""
    good, other = (stream.laid_out(tokens(stream.subject, count)) for count in (2, 3))
    few_heads = stream.laid_out(tokens(stream.subject, 2, heads=HEADS - 1))
    wide = stream.laid_out(tokens(stream.subject, 2, dim=DIM + 1))
    narrow = stream.laid_out(tokens(stream.subject, 2, dim=DIM - 1))
    bad = [(good, other), (few_heads, few_heads), (wide, wide), (narrow, narrow), (good, narrow), (good, few_heads)]
    return [*bad, (good.reshape(-1), good.reshape(-1)), (good[None], good[None]), (good[..., 0], good[..., 0])]


def out_of_range(stream: Stream) -> list[Bad]:
    """Calls that name a layer, head, position or sequence which is not there."""
    sequence, length = stream.sequence, len(stream)
    keys, values = pair_of_tokens(stream.subject, 1)
    if stream.family == "contiguous":
        over = np.zeros((1, HEADS, 21 - length, DIM), np.float32)
        return [("CapacityExceeded", "append", (over, over)), ("CapacityExceeded", "advance", (21,))]
    if stream.family == "paged":
        calls: list[Bad] = [
            ("OutOfBlocks", "ensure_capacity", (sequence, 500)),
            ("PositionOutOfRange", "ensure_capacity", (sequence, -1)),
            ("PositionOutOfRange", "slot_mapping", (sequence, 0, 0, -1)),
            ("PositionOutOfRange", "write", (sequence, 0, length + 1, keys, values)),
            ("PositionOutOfRange", "write", (sequence, 0, -1, keys, values)),
        ]
        many = pair_of_tokens(stream.subject, 9)  # they would need blocks
        for layer in (-1, 2):
            calls += [("LayerOutOfRange", "write", (sequence, layer, 0, keys, values))]
            calls += [("LayerOutOfRange", "write", (sequence, layer, length, *many))]
            calls += [("LayerOutOfRange", name, (sequence, layer)) for name in ("gather", "length", "block_table")]
            calls += [("LayerOutOfRange", "read", (sequence, layer, [0]))]
        calls += [("PositionOutOfRange", "read", (sequence, 0, [0, position])) for position in (-1, length)]
        calls += [("SequenceNotFound", "gather", (other, 0)) for other in (-1, sequence + 10**6)]
        calls += [("SequenceNotFound", "write", (other, 0, 0, keys, values)) for other in (-1, sequence + 10**6)]
        return calls
    if stream.family == "quantized":
        calls = []
        for layer in (-1, 2):
            calls += [("LayerOutOfRange", "append", (layer, keys, values))]
            calls += [("LayerOutOfRange", "read_token", (layer, 0)), ("LayerOutOfRange", "length", (layer,))]
            calls += [("LayerOutOfRange", "read_tokens", (layer, []))]
        for position in (-1, length):
            calls += [("PositionOutOfRange", "read_token", (0, position))]
            calls += [("PositionOutOfRange", "read_tokens", (0, [0, position]))]
            calls += [("PositionOutOfRange", "read_head", (0, position, 0))]
        return calls + [("HeadOutOfRange", "read_head", (0, 0, head)) for head in (-1, HEADS)]
    if stream.family == "tiered":
        return [("PositionOutOfRange", "tier_of", (position,)) for position in (-1, length)]
    return []  # nothing in a pooled cache is named by number


@check_each("LAW-10", *CACHES)
def a_wrong_shape_is_refused(subject: Subject, family: str) -> None:
    stream, _, _ = filled(subject, family)
    before = stream.observe()
    for keys, values in wrong_shapes(stream):
        with raises("ShapeMismatch"):
            stream.give(keys, values)
        same_observables(stream.observe(), before, f"after keys {list(keys.shape)}, values {list(values.shape)} were refused")


def other_ways_in(stream: Stream) -> dict[str, list[tuple[Any, ...]]]:
    """Methods besides `give`'s that take arrays, each with arguments in which only a shape is wrong."""
    subject, sequence = stream.subject, stream.sequence
    wide, few_heads, flat = tokens(subject, 1, dim=DIM + 1), tokens(subject, 1, heads=HEADS - 1), tokens(subject, 1)[0]
    good, two = tokens(subject, 1), tokens(subject, 2)
    queries = [wide, flat, tokens(subject, 1, heads=HEADS + 1)]  # HEADS + 1 query heads cannot share HEADS evenly
    if stream.family == "contiguous":
        pairs = [np.stack([part, part]) for part in (wide, few_heads)] + [np.stack([good, good, good]), good]
        return {"append_fused": [(batch_major(part) if part.ndim == 3 else _fused(part),) for part in pairs]}
    wrong = [(wide, wide), (few_heads, few_heads), (flat, flat), (two, two), (good, wide), (good, two)]
    if stream.family == "paged":
        steps = [(np.stack([key, key]), np.stack([value, value])) for key, value in wrong] + [(good[None], good[None])]
        return {
            "append": [([sequence], 0, *pair) for pair in wrong],
            "append_step": [([sequence], *pair) for pair in steps],
            "attend": [(sequence, 0, query, 1.0) for query in queries],
        }
    if stream.family == "quantized":
        steps = [(np.repeat(part, 2, axis=0),) * 2 for part in (wide, few_heads)] + [(good, good), (good[0], good[0])]
        return {"append_step": steps, "attend": [(0, query, 1.0) for query in queries]}
    return {"attend": [(query, 1.0) for query in queries]}


def _fused(pair: NDArray) -> NDArray:
    """[parts, n, heads, dim] as [parts, 1, heads, n, dim]."""
    return np.stack([batch_major(part) for part in pair])


@check_each("LAW-10", "contiguous", "paged", "quantized", "tiered")
def a_wrong_shape_is_refused_by_every_way_in(subject: Subject, family: str) -> None:
    stream, _, _ = filled(subject, family)
    before, tried = stream.observe(), 0
    for method, calls in other_ways_in(stream).items():
        for arguments in calls:
            with suppress(NotOffered):
                with raises("ShapeMismatch"):
                    getattr(stream.cache, method)(*arguments)
                tried += 1
            same_observables(stream.observe(), before, f"after {method} refused a wrong shape")
    if not tried:
        raise NotOffered("other ways in")


@check("LAW-10", "attention")
def attention_refuses_shapes_that_do_not_fit(subject: Subject) -> None:
    query, keys, values = tokens(subject, 1), tokens(subject, 4), tokens(subject, 4)
    wide, fewer, uneven = tokens(subject, 4, dim=DIM + 1), tokens(subject, 3), tokens(subject, 1, heads=HEADS + 1)
    few_heads, flat, nothing = tokens(subject, 4, heads=HEADS - 1), values[..., 0], slice(0)
    for wrong in ((query, wide, values), (query, keys, fewer), (uneven, keys, values), (query[0], keys, values),
                  (query, keys, few_heads), (query, keys, flat), (query[..., nothing], keys[..., nothing], values),
                  (query, keys, values[..., nothing])):  # fmt: skip
        with raises("ShapeMismatch"):
            subject.new("attention").attention(*wrong, scale=1.0, causal=False, length=3)


@check_each("LAW-11", "contiguous", "paged", "quantized", "tiered")
def what_is_out_of_range_is_refused(subject: Subject, family: str) -> None:
    stream, _, _ = filled(subject, family)
    before = stream.observe()
    for kind, method, arguments in out_of_range(stream):
        with suppress(NotOffered), raises(kind):
            getattr(stream.cache, method)(*arguments)
        same_observables(stream.observe(), before, f"after {kind}")


@check_each("LAW-01", *CACHES)
def an_operation_that_raises_leaves_no_trace(subject: Subject, family: str) -> None:
    stream, keys, values = filled(subject, family)
    before = stream.observe()
    for bad_keys, bad_values in wrong_shapes(stream):
        with raises("Exception"):
            stream.give(bad_keys, bad_values)
    same_observables(stream.observe(), before, "after every wrong shape")
    for _, method, arguments in out_of_range(stream):
        with suppress(NotOffered), raises("Exception"):
            getattr(stream.cache, method)(*arguments)
    float64 = stream.laid_out(tokens(subject, 1)).astype(np.float64)
    with raises("DtypeMismatch"):
        stream.give(float64, float64)
    same_observables(stream.observe(), before, "after every wrong call")
    more = pair_of_tokens(subject, 2)
    stream.append(*more)
    want = [np.concatenate([a, b]) for a, b in zip((keys, values), more, strict=True)]
    reads(subject, stream.read(), stream.expected(*want), "tokens appended after every wrong call")


@check("LAW-01", "quantized")
def a_step_goes_to_all_layers_or_none(subject: Subject) -> None:
    cache = new(subject, "quantized", capacity=2)
    cache.append(1, *pair_of_tokens(subject, 2))
    with raises("CapacityExceeded"):
        cache.append_step(*pair_of_tokens(subject, 2))  # layer 1 is full, layer 0 is not
    equal((cache.length(0), cache.length(1)), (0, 2), "lengths after a step that did not fit")


@check("LAW-01", "quantized")
def tokens_go_to_a_layer_all_or_none(subject: Subject) -> None:
    cache, (keys, values) = new(subject, "quantized", capacity=4), pair_of_tokens(subject, 2)
    cache.append(0, keys, values)
    first = cache.read_tokens(0, [0, 1])
    with raises("CapacityExceeded"):
        cache.append(0, *pair_of_tokens(subject, 3))  # two of them would fit
    equal(cache.length(0), 2, "length after tokens of which some did not fit")
    pair(cache.read_tokens(0, [0, 1]), first, "tokens before some that did not fit")


@check("LAW-01", "paged")
def blocks_are_taken_all_or_none(subject: Subject) -> None:
    cache = new(subject, "paged", num_blocks=5)
    sequence = cache.create()
    keys, values = pair_of_tokens(subject, 7)
    with raises("OutOfBlocks"):
        cache.write(sequence, 0, 0, keys, values)  # 3 blocks in each of 2 layers
    equal(cache.num_free_blocks, 5, "free blocks after a write that did not fit")
    equal(cache.length(sequence, 0), 0, "length after a write that did not fit")
    cache.write(sequence, 0, 0, keys[:6], values[:6])
    equal(cache.num_free_blocks, 1, "free blocks after a write that fits")


BAD_SIZES: tuple[Any, ...] = (0, -1, 1.5, None, "2")


def _refused(subject: Subject, family: str, **change: Any) -> None:
    with raises("ConfigError"):
        subject.new(family, **SMALL[family] | change)


@check_each("LAW-12", *SMALL)
def a_configuration_that_makes_no_sense_is_refused(subject: Subject, family: str) -> None:
    may_be_zero = {"initial_capacity", "tail_length", "warm_length"} | (
        {"num_blocks"} if family in ("blocks", "paged") else set()
    )
    new(subject, family)
    tried = 0
    for name, value in SMALL[family].items():
        wrong_kind = "int8" if "dtype" in name else "float16"  # a format, but not one for this
        sizes = BAD_SIZES[1:] if name in may_be_zero else BAD_SIZES
        bad_values = ("float7", "", None, wrong_kind) if isinstance(value, str) else sizes
        for bad in bad_values:
            with suppress(NotOffered):
                _refused(subject, family, **{name: bad})
                tried += 1
    if not tried:
        raise NotOffered("a cache that is given its sizes")


@check("LAW-12", "tiered")
def tiers_must_fit_the_cache(subject: Subject) -> None:
    _refused(subject, "tiered", tail_length=21)
    _refused(subject, "tiered", tail_length=11, warm_length=10)


@check("LAW-12", "pooled")
def a_block_must_fit_the_cache(subject: Subject) -> None:
    _refused(subject, "pooled", tokens_per_block=21)
