"""Checks of LAW-16, LAW-17, FMT-LEVEL-04 and FMT-LEVEL-05: who owns an array, and which dtypes are accepted."""

from contextlib import suppress
from functools import partial

import numpy as np

from kvref_conformance.checking.expect import may_raise, raises, same, true
from kvref_conformance.checking.registry import law
from kvref_conformance.checking.setup import held
from kvref_conformance.checking.streams import Stream, filled, same_observables
from kvref_conformance.families.rows.handed import NEAR, largest
from kvref_conformance.outcome import NotOffered


@law("LAW-16")
def what_is_handed_in_is_left_alone(stream: Stream) -> None:
    subject = stream.subject
    subject.in_this_process()
    given = stream.tokens(subject.size("tokens", 5))
    stream.need_room(len(given[0]))
    keys, values = (stream.laid_out(part) for part in given)
    own_keys, own_values = subject.own(keys), subject.own(values)
    stream.give(own_keys, own_values)
    same(subject.numpy(own_keys.array), keys, "the appended keys array, after the append")
    same(subject.numpy(own_values.array), values, "the appended values array, after the append")


@law("LAW-17", "read_as_is")
def what_was_read_stays(stream: Stream) -> None:
    subject = stream.subject
    subject.in_this_process()
    filled(stream, 4)
    first = stream.read_as_is()
    before = [subject.numpy(part) for part in first]
    stream.append(*stream.tokens(5))
    stream.read_as_is()
    for change in (partial(stream.overwrite, *stream.tokens(4)), stream.forget):
        with suppress(NotOffered):
            change()
    stream.append(*stream.tokens(4))
    stream.read_as_is()
    for name, part, was in zip(("keys", "values"), first, before, strict=True):
        same(subject.numpy(part), was, f"{name} that an earlier read returned, after later writes and reads")


@law("FMT-LEVEL-04b")
def float64_is_refused(stream: Stream) -> None:
    filled(stream, 2)
    before = stream.observe()
    keys, values = (stream.laid_out(part) for part in stream.tokens(1))
    wide_keys, wide_values = (part.astype(np.float64) for part in (keys, values))
    for pair in ((wide_keys, wide_values), (keys, wide_values), (wide_keys, values)):
        with raises("DtypeMismatch"):
            stream.give(*pair)
        same_observables(stream.observe(), before, "after a float64 array was rejected")


@law("FMT-LEVEL-05", "quantizing")
def what_a_cache_takes_never_reads_back_infinite(stream: Stream) -> None:
    subject = stream.subject
    for quantizing in stream.quantizing():
        token = held(subject, np.full((1, subject.heads, subject.dim), NEAR[0] * largest(subject)))
        token[0, 0, 0] = largest(subject)
        with may_raise("NonFinite"):
            quantizing.append(token, token)
            for part in quantizing.read():
                what = f"a token with the largest {subject.dtype} value, in a cache of {quantizing.config}"
                true(np.isfinite(part).all(), what, "finite values, or NonFinite", part.tolist())
