"""LAW-16, LAW-17 and FMT-LEVEL-04: whose an array is, and which dtype it may have."""

from collections.abc import Callable
from typing import Any

import numpy as np

from kvref_conformance.checking.expect import raises, same
from kvref_conformance.checking.registry import CACHES, check, check_each
from kvref_conformance.checking.setup import new, pair_of_tokens, tokens
from kvref_conformance.checking.streams import Stream
from kvref_conformance.checks.laws_streams import filled, same_observables
from kvref_conformance.drivers.in_process import Subject


@check_each("LAW-16", *CACHES)
def what_is_handed_in_is_left_alone(subject: Subject, family: str) -> None:
    subject.in_this_process()
    stream, (keys, values) = Stream(subject, family), pair_of_tokens(subject, 5)
    keys, values = stream.laid_out(keys), stream.laid_out(values)
    own_keys, own_values = subject.own(keys), subject.own(values)
    stream.give(own_keys, own_values)
    same(subject.numpy(own_keys.array), keys, "keys, after they were appended")
    same(subject.numpy(own_values.array), values, "values, after they were appended")


@check("LAW-16", "buffers")
def what_a_buffer_takes_is_left_alone(subject: Subject) -> None:
    subject.in_this_process()
    values = np.array([1.5, -2.5], np.float32)
    own = subject.own(values)
    new(subject, "buffers").acquire(8).extend(own)
    same(subject.numpy(own.array), values, "values, after a buffer took them")


@check("LAW-16", "rows")
def rows_are_left_alone(subject: Subject) -> None:
    subject.in_this_process()
    for name in subject.formats("int8", "float8_e4m3fn", "float8_e5m2", "q8", "q4"):
        rows = tokens(subject, 3)[:, 0]
        own = subject.own(rows)
        subject.new("rows").quantize(own, name)
        same(subject.numpy(own.array), rows, f"rows, after they were quantized to {name}")


@check("LAW-16", "attention")
def attention_leaves_its_inputs_alone(subject: Subject) -> None:
    subject.in_this_process()
    given = {"query": tokens(subject, 2), "keys": tokens(subject, 4), "values": tokens(subject, 4)}
    own = {name: subject.own(rows) for name, rows in given.items()}
    subject.new("attention").attention(*own.values(), scale=0.5, causal=True, length=3)
    for name, rows in given.items():
        same(subject.numpy(own[name].array), rows, f"the {name}, after attention")


@check_each("LAW-17", "paged", "quantized", "tiered", "pooled")
def what_was_read_stays(subject: Subject, family: str) -> None:
    subject.in_this_process()
    stream, _, _ = filled(subject, family, 4)
    ways: dict[str, Callable[[], Any]] = {
        "paged": lambda: stream.cache.as_is("gather", stream.sequence, 0),
        "quantized": lambda: stream.cache.as_is("read_tokens", 0, [0, 1]),
        "tiered": lambda: stream.cache.as_is("read"),
        "pooled": lambda: stream.cache.as_is("read"),
    }
    reading = ways[family]
    first = reading()
    before = [subject.numpy(part) for part in first]
    stream.append(*pair_of_tokens(subject, 5))
    reading()
    if family == "paged":
        stream.cache.write(stream.sequence, 0, 0, *pair_of_tokens(subject, 4))
    stream.forget()
    stream.append(*pair_of_tokens(subject, 4))
    reading()
    for name, part, was in zip(("keys", "values"), first, before, strict=True):
        same(subject.numpy(part), was, f"{name} read earlier, after other tokens were written and read")


@check_each("FMT-LEVEL-04", *CACHES)
def float64_is_refused(subject: Subject, family: str) -> None:
    stream, _, _ = filled(subject, family, 2)
    before, (keys, values) = stream.observe(), pair_of_tokens(subject, 1)
    good, wide = stream.laid_out(keys), stream.laid_out(values).astype(np.float64)
    for pair in ((wide, wide), (good, wide), (wide, good)):
        with raises("DtypeMismatch"):
            stream.give(*pair)
        same_observables(stream.observe(), before, "after float64 was refused")
