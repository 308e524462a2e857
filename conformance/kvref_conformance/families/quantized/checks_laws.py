"""Checks of LAW-01, LAW-02, LAW-05, LAW-13 and LAW-20 for this family."""

from collections.abc import Iterator

from kvref_conformance.checking.expect import equal, pair, raises, reads
from kvref_conformance.checking.integers import Seen, Typed, the_same_in_any_type
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, new, pair_of_tokens
from kvref_conformance.checking.streams import MANY, filled
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.quantized.stream import QuantizedStream, formats_of_tokens


def stepped(subject: Subject, steps: int, **config: str) -> Handle:
    """Returns a cache after `steps` steps."""
    cache = new(subject, "quantized", **config)
    at_least(cache, capacity=steps)
    for _ in range(steps):
        cache.append_step(*pair_of_tokens(subject, cache.config["num_layers"]))
    return cache


@check("LAW-01", "quantized")
def a_step_goes_to_all_layers_or_none(subject: Subject) -> None:
    subject.need(num_layers=2)
    cache = new(subject, "quantized", capacity=2)
    layers, capacity = cache.config["num_layers"], cache.config["capacity"]
    cache.append(1, *pair_of_tokens(subject, capacity))
    with raises("CapacityExceeded"):
        cache.append_step(*pair_of_tokens(subject, layers))  # layer 1 is full, layer 0 is not
    equal((cache.length(0), cache.length(1)), (0, capacity), "lengths after a step that raised CapacityExceeded")


@check("LAW-01", "quantized")
def tokens_go_to_a_layer_all_or_none(subject: Subject) -> None:
    stream, _, _ = filled(QuantizedStream(subject, capacity=4), 2)
    first = stream.read()
    with raises("CapacityExceeded"):
        stream.give(*pair_of_tokens(subject, stream.config["capacity"] - 1))  # one token too many
    equal(len(stream), 2, "length after an append that raised CapacityExceeded")
    pair(stream.read(), first, "tokens after an append that raised CapacityExceeded")


@check("LAW-20", "quantized")
def bytes_are_counted_whatever_the_sizes_are_given_in(subject: Subject) -> None:
    def script(typed: Typed) -> Iterator[Seen]:
        cache = typed.new("quantized", capacity=100)
        yield "memory_bytes and fp32_bytes", (cache.memory_bytes, cache.fp32_bytes)

    the_same_in_any_type(subject, script)


@check("LAW-20", "quantized")
def tokens_are_read_whatever_they_are_named_in(subject: Subject) -> None:
    sizes = new(subject, "quantized").config
    layer, head = int(sizes["num_layers"]) - 1, int(sizes["num_kv_heads"]) - 1
    steps = [pair_of_tokens(subject, sizes["num_layers"]) for _ in range(2)]

    def script(typed: Typed) -> Iterator[Seen]:
        cache = typed.new("quantized", capacity=100)
        at_least(cache, capacity=len(steps))
        for step in steps:
            cache.append_step(*step)
        yield f"length of layer {layer}", typed.call(cache, "length", layer)
        yield "tokens 1 and 0", typed.call(cache, "read_tokens", layer, [1, 0])
        yield f"head {head} of token 1", typed.call(cache, "read_head", layer, 1, head)

    the_same_in_any_type(subject, script)


@check("LAW-20", "quantized")
def tokens_are_appended_whatever_the_layer_is_named_in(subject: Subject) -> None:
    subject.need(num_layers=2)
    keys, values = pair_of_tokens(subject, 2)

    def script(typed: Typed) -> Iterator[Seen]:
        cache = typed.new("quantized", capacity=100)
        yield "append to layer 1", typed.call(cache, "append", 1, keys, values)
        yield "length of layer 1", typed.call(cache, "length", 1)
        yield "tokens 1 and 0", typed.call(cache, "read_tokens", 1, [1, 0])

    the_same_in_any_type(subject, script)


@check("LAW-05a", "quantized")
def a_token_never_appended_cannot_be_read(subject: Subject) -> None:
    for name in formats_of_tokens(subject):
        cache = stepped(subject, 3, format=name)
        for layer in range(cache.config["num_layers"]):
            with raises("PositionOutOfRange"):
                cache.read_token(layer, 3)


@check("LAW-05a", "quantized")
def a_token_that_was_cleared_cannot_be_read(subject: Subject) -> None:
    for name in formats_of_tokens(subject):
        cache = stepped(subject, 3, format=name)
        cache.clear()
        for layer in range(cache.config["num_layers"]):
            for position in (0, 2):
                with raises("PositionOutOfRange"):
                    cache.read_token(layer, position)
                with raises("PositionOutOfRange"):
                    cache.read_head(layer, position, 0)


@check("LAW-13b", "quantized")
def reading_no_positions_gives_no_tokens(subject: Subject) -> None:
    stream, _, _ = filled(QuantizedStream(subject))
    keys, values = stream.cache.read_tokens(0, [])
    equal((len(keys), len(values)), (0, 0), "tokens read at 0 positions")


@check("LAW-02a", "quantized")
def layers_are_apart(subject: Subject) -> None:
    subject.need(num_layers=2)
    stream, keys, values = filled(QuantizedStream(subject))
    stream.cache.append(1, *pair_of_tokens(subject, 1))
    equal(stream.cache.length(0), MANY, "length of layer 0 after an append to layer 1")
    reads(subject, stream.read(), stream.expected(keys, values), "layer 0 after an append to layer 1")


@check("LAW-20", "quantized")
def tokens_go_whatever_the_length_is_given_in(subject: Subject) -> None:
    keys, values = pair_of_tokens(subject, 110)

    def script(typed: Typed) -> Iterator[Seen]:
        cache = typed.new("quantized", num_layers=1, capacity=200)
        at_least(cache, capacity=200)
        cache.append(0, keys, values)
        for time in range(3):
            yield f"truncate(100), call {time + 1}", typed.call(cache, "truncate", 100)
            cache.append(0, keys[:60], values[:60])
            yield f"length after an append of 60, call {time + 1}", cache.length(0)
        yield "tokens 159 and 100", typed.call(cache, "read_tokens", 0, [159, 100])

    the_same_in_any_type(subject, script)
