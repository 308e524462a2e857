"""Checks of FMT-STATIC: a cache with a fixed scale for keys and one for values."""

from collections.abc import Iterator

from kvref_conformance.checking.attending import even, exact, queries
from kvref_conformance.checking.expect import equal, raises, within
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, formats_of, held, new, pair_of_tokens, refused, takes
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.quantized.checks import LOUD, reads_back
from kvref_conformance.families.quantized.stream import QuantizedStream
from kvref_conformance.oracle.formats import STATIC
from kvref_conformance.outcome import NotOffered

KEY_SCALE, VALUE_SCALE = 0.5, 0.037


def each(subject: Subject, **given: float) -> Iterator[QuantizedStream]:
    """Yields a cache of one layer per format, with these scales."""
    for name in formats_of(subject, "format", *STATIC):
        stream = QuantizedStream(subject, num_layers=1, format=name, **given)
        at_least(stream.cache, capacity=4)
        yield stream


@check("FMT-STATIC-06a", "quantized")
def keys_and_values_are_stored_by_the_scale_that_is_theirs(subject: Subject) -> None:
    for stream in each(subject, key_scale=KEY_SCALE, value_scale=VALUE_SCALE):
        keys, values = pair_of_tokens(subject, 4)
        keys[2:] = held(subject, keys[2:] * LOUD)  # a scale computed from the first tokens would clip these
        stream.give(keys[:2], values[:2])
        stream.give(keys[2:], values[2:])
        reads_back(stream, keys, values, f"{stream.config['format']} tokens")
        stream.cache.truncate(1)
        stream.give(values[1:], keys[1:])
        keys[1:], values[1:] = values[1:].copy(), keys[1:].copy()
        reads_back(stream, keys, values, f"{stream.config['format']} tokens, three of which replace removed ones")


@check("FMT-STATIC-06b", "quantized")
def a_scale_that_is_not_given_is_one(subject: Subject) -> None:
    for given in ({}, {"key_scale": KEY_SCALE}, {"value_scale": VALUE_SCALE}):
        for stream in each(subject, **given):
            keys, values = pair_of_tokens(subject, 3)
            stream.give(keys, values)
            reads_back(stream, keys, values, f"{stream.config['format']} tokens with scales {given or 'not passed'}")


@check("ATTN-10", "quantized")
def attention_is_over_keys_and_values_by_the_scale_that_is_theirs(subject: Subject) -> None:
    for stream in each(subject, key_scale=KEY_SCALE, value_scale=VALUE_SCALE):
        stream.give(*pair_of_tokens(subject, 4))
        query = queries(subject, 1)
        want, bound = exact(subject, query, *stream.read(), scale=even(subject))
        within(stream.cache.attend(0, query, even(subject)), want, bound, f"attention over {stream.config['format']} tokens")


@check("FMT-STATIC-05a", "quantized")
def a_cache_of_a_scale_that_is_none_is_refused(subject: Subject) -> None:
    for name in formats_of(subject, "format", *STATIC):
        for which in ("key_scale", "value_scale"):
            for wrong in (0.0, -0.5, *(() if subject.by_value else (float("nan"), float("inf")))):
                config = new(subject, "quantized", format=name).config
                with raises("ConfigError"):
                    subject.new("quantized", **config | {which: wrong})


@check("FMT-STATIC-05b", "quantized")
def a_cache_whose_format_makes_its_own_scales_takes_none(subject: Subject) -> None:
    formats_of(subject, "format", *STATIC)
    if not takes(subject, "format", "int8"):
        raise NotOffered("format int8")
    for which in ("key_scale", "value_scale"):
        refused(subject, "quantized", **{"format": "int8", which: 0.5})


@check("FMT-STATIC-08", "quantized")
def memory_is_a_byte_a_number(subject: Subject) -> None:
    for name in formats_of(subject, "format", *STATIC):
        cache = new(subject, "quantized", format=name, key_scale=KEY_SCALE)
        layers, capacity, heads, dim = (cache.config[size] for size in ("num_layers", "capacity", "num_kv_heads", "head_dim"))
        equal(cache.memory_bytes, 2 * layers * capacity * heads * dim, f"memory_bytes in {name}")
