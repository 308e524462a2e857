"""Checks of LAW-01, LAW-10, LAW-11 and LAW-12: invalid calls raise the right error and change no observable."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from kvref_conformance.checking.expect import raises, reads
from kvref_conformance.checking.registry import law, of_each_configuration
from kvref_conformance.checking.setup import new, refused, takes
from kvref_conformance.checking.streams import Stream, filled, same_observables
from kvref_conformance.conversation.derived import refused_whole
from kvref_conformance.conversation.exchange import KNOWN_KINDS, error_of
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families import Family
from kvref_conformance.outcome import Broken, NotOffered


@law("LAW-10")
def a_wrong_shape_is_refused(stream: Stream) -> None:
    filled(stream)
    before = stream.observe()
    for keys, values in stream.wrong_shapes():
        with raises("ShapeMismatch"):
            stream.give(keys, values)
        same_observables(stream.observe(), before, f"after rejected keys {list(keys.shape)}, values {list(values.shape)}")


@law("LAW-10", "other_ways_in")
def a_wrong_shape_is_refused_by_every_way_in(stream: Stream) -> None:
    filled(stream)
    before, tried = stream.observe(), 0
    for method, calls in stream.other_ways_in().items():
        for arguments in calls:
            with suppress(NotOffered):
                with raises("ShapeMismatch"):
                    getattr(stream.cache, method)(*arguments)
                tried += 1
            same_observables(stream.observe(), before, f"after {method} rejected a wrong shape")
    if not tried:
        raise NotOffered("another operation that appends arrays")


@law("LAW-11", "out_of_range")
def what_is_out_of_range_is_refused(stream: Stream) -> None:
    filled(stream)
    before = stream.observe()
    for kind, method, arguments in stream.out_of_range():
        with suppress(NotOffered), raises(kind):
            getattr(stream.cache, method)(*arguments)
        same_observables(stream.observe(), before, f"after {method} raised {kind}")


@law("LAW-01")
def an_operation_that_raises_leaves_no_trace(stream: Stream) -> None:
    """A call that raises no such error breaks other clauses. It is left out, and the rest begins again in a new stream."""
    stream, keys, values = filled(stream)
    before, left_out = stream.observe(), set[int]()
    while True:
        results = dict[int, bool | None]()
        for i, call in enumerate(_invalid_calls(stream)):
            if i not in left_out:
                results[i] = _is_rejected(call)
            if results.get(i) is False:  # it may have changed the stream, so that later calls are valid
                left_out.add(i)
                break
        else:
            break
        stream, keys, values = filled(stream.fresh())
        before = stream.observe()
    if True not in results.values():
        raise NotOffered("an invalid call that raises an error of the specification")
    same_observables(stream.observe(), before, "after invalid calls")
    more = stream.tokens(2)
    stream.append(*more)
    want = [np.concatenate([a, b]) for a, b in zip((keys, values), more, strict=True)]
    reads(stream.subject, stream.read(), stream.expected(*want), "tokens appended after invalid calls")


def _is_rejected(call: Callable[[], Any]) -> bool | None:
    """Whether a call raises an error of the specification; None if it is not offered."""
    try:
        call()
    except NotOffered:
        return None
    except Broken:
        raise
    except Exception as error:
        refused_whole(error)
        return error_of(error).kind in KNOWN_KINDS
    return False


def _invalid_calls(stream: Stream) -> list[Callable[[], Any]]:
    """Returns calls with wrong shapes, values out of range and a wrong dtype."""
    calls = [partial(stream.give, keys, values) for keys, values in stream.wrong_shapes()]
    calls += [partial(_call, stream, method, arguments) for _, method, arguments in stream.out_of_range()]
    return [*calls, partial(stream.give, *(stream.laid_out(part).astype(np.float64) for part in stream.tokens(1)))]


def _call(stream: Stream, method: str, arguments: tuple[Any, ...]) -> None:
    getattr(stream.cache, method)(*arguments)


BAD_SIZES: tuple[Any, ...] = (0, -1, 1.5, None, "2")


@of_each_configuration("LAW-12a")
def a_configuration_that_makes_no_sense_is_refused(subject: Subject, family: Family) -> None:
    new(subject, family.name)
    tried = 0
    for name, value in family.small.items():
        sizes = BAD_SIZES[1:] if name in family.may_be_zero else BAD_SIZES
        bad_values = ("float7", "", None, "int8", "float16") if isinstance(value, str) else sizes
        for bad in (bad for bad in bad_values if bad not in family.formats.get(name, ())):
            with suppress(NotOffered):
                refused(subject, family.name, **{name: bad})
                tried += 1
    if not tried:
        raise NotOffered("a factory that accepts sizes")


ODD = (1, 3, 7)  # sizes to try where the limits name none
FEW = 3  # values to try at each end of a list of allowed values
LARGEST = 64  # times the size that checks use by default; larger sizes would need too much memory


@of_each_configuration("LAW-12b")
def what_the_limits_allow_is_made(subject: Subject, family: Family) -> None:
    begun = new(subject, family.name).config
    for name in family.small:
        for value in _at_the_edges(subject, family, name, begun[name]):
            with suppress(NotOffered):  # the format is not provided, or the sizes are not valid together
                new(subject, family.name, **{name: value})


def _at_the_edges(subject: Subject, family: Family, name: str, begun: Any) -> list[Any]:
    """Returns values that the limits allow, without `begun`, the value that checks use by default."""
    if name in family.formats:
        return [each for each in family.formats[name] if takes(subject, name, each)]
    limit = subject.limits.of(family.name, name)
    ends = sorted(limit.among)
    wanted = {*ends[:FEW], *ends[-FEW:], *ODD, limit.least + 1, limit.most or begun}
    wanted |= {0} if name in family.may_be_zero else set()
    return sorted({near for each in wanted if (near := limit.nearest(each)) <= LARGEST * max(begun, 1)} - {begun})
