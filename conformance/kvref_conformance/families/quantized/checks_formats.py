"""Checks of QUANT-10: a cache in formats of groups."""

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import equal, raises
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, new, pair_of_tokens, takes
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.quantized.checks import reads_back
from kvref_conformance.families.quantized.stream import QuantizedStream, formats_in_groups
from kvref_conformance.oracle.formats import group_of
from kvref_conformance.oracle.tokens import row_bytes
from kvref_conformance.outcome import NotOffered


def four_tokens(subject: Subject, format: str) -> tuple[QuantizedStream, NDArray, NDArray]:
    """Returns a cache with two groups per row and 4 tokens, and the tokens."""
    stream = QuantizedStream(subject, num_layers=1, format=format, head_dim=2 * group_of(format))
    at_least(stream.cache, capacity=4)
    keys, values = pair_of_tokens(subject, 4, stream.config["num_kv_heads"], stream.config["head_dim"])
    stream.give(keys, values)
    return stream, keys, values


@check("QUANT-10a", "quantized")
def tokens_read_back_as_their_format_says(subject: Subject) -> None:
    for name in formats_in_groups(subject):
        stream, keys, values = four_tokens(subject, name)
        reads_back(stream, keys, values, f"4 {name} tokens")


@check("QUANT-10b", "quantized")
def codes_and_scales_go_and_come_together(subject: Subject) -> None:
    for name in formats_in_groups(subject):
        stream, keys, values = four_tokens(subject, name)
        stream.cache.truncate(2)
        keys[2:], values[2:] = pair_of_tokens(subject, 2, *keys.shape[1:])  # with other magnitudes
        stream.give(keys[2:], values[2:])
        reads_back(stream, keys, values, f"{name} tokens, two of which replace truncated ones")
        stream.cache.clear()
        stream.give(values, keys)
        reads_back(stream, values, keys, f"{name} tokens after clear and append")


@check("QUANT-10c", "quantized")
def memory_is_what_the_format_stores(subject: Subject) -> None:
    for name in formats_in_groups(subject):
        cache = new(subject, "quantized", format=name, head_dim=2 * group_of(name))
        rows = 2 * cache.config["num_layers"] * cache.config["capacity"] * cache.config["num_kv_heads"]
        equal(cache.memory_bytes, rows * row_bytes(cache.config["head_dim"], name), f"memory_bytes in {name}")


@check("QUANT-10d", "quantized")
def a_head_dim_that_no_group_goes_into_is_refused(subject: Subject) -> None:
    tried = [
        (name, dim)
        for name in formats_in_groups(subject)
        for dim in (group_of(name) + 1, group_of(name) // 2)
        if takes(subject, "head_dim", dim)
    ]
    if not tried:
        raise NotOffered("a head_dim that is not a multiple of a group")
    for name, dim in tried:
        config = new(subject, "quantized", format=name, head_dim=group_of(name)).config
        with raises("ConfigError"):
            subject.new("quantized", **config | {"head_dim": dim})
