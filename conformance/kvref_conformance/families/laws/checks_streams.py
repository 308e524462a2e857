"""Checks of LAW on every family, through its Stream."""

from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import equal, reads
from kvref_conformance.checking.registry import law
from kvref_conformance.checking.streams import MANY, Stream, filled, same_observables
from kvref_conformance.conversation.calls import Own
from kvref_conformance.conversation.exchange import kinds_of
from kvref_conformance.outcome import Broken, NotOffered


@law("LAW-02b")
def keys_and_values_are_stored_apart(stream: Stream) -> None:
    keys, values = stream.tokens(MANY)
    stream.append(keys, np.zeros_like(values))
    reads(stream.subject, stream.read(), stream.expected(keys, np.zeros_like(values)), "tokens whose values are all zero")


@law("LAW-02a")
def two_caches_share_nothing(stream: Stream) -> None:
    first, keys, values = filled(stream)
    second, _, _ = filled(stream.fresh())
    second.append(*stream.tokens(2))
    reads(stream.subject, first.read(), first.expected(keys, values), "a cache, after another cache was filled")


@law("LAW-04")
def what_is_read_is_what_was_written(stream: Stream) -> None:
    _, keys, values = filled(stream)
    equal(len(stream), MANY, f"number of tokens after appends of {MANY}")
    reads(stream.subject, stream.read(), stream.expected(keys, values), f"the tokens after appends of {MANY}")
    more_keys, more_values = stream.tokens(3)
    stream.append(more_keys, more_values)
    all_keys, all_values = np.concatenate([keys, more_keys]), np.concatenate([values, more_values])
    reads(stream.subject, stream.read(), stream.expected(all_keys, all_values), f"the tokens after appends of {MANY + 3}")


@law("LAW-05b")
def nothing_of_the_last_owner_is_left(stream: Stream) -> None:
    filled(stream)
    stream.forget()
    equal(len(stream), 0, "number of tokens after clear or drop")
    keys, values = stream.tokens(2)
    stream.append(keys, values)
    reads(stream.subject, stream.read(), stream.expected(keys, values), "2 tokens appended after clear or drop")


@law("LAW-06")
def pieces_leave_what_the_whole_leaves(stream: Stream) -> None:
    stream.subject.need(tokens=2)
    whole, keys, values = filled(stream, stream.subject.size("tokens", MANY))
    for size in (1, 2, 4, 7):
        pieces = stream.fresh()
        for start in range(0, len(keys), size):
            pieces.append(keys[start : start + size], values[start : start + size])
        same_observables(pieces.observe(), whole.observe(), f"after appends of {size} tokens each")


@law("LAW-07")
def two_streams_can_take_turns(stream: Stream) -> None:
    def run(order: str) -> list[dict[str, Any]]:
        first = stream.fresh()
        streams = {"a": first, "b": first.another()}
        done = {"a": 0, "b": 0}
        for name in order:
            rows, at = given[name], done[name]
            streams[name].append(rows[0][at : at + 2], rows[1][at : at + 2])
            done[name] += 2
        return [each.observe() for each in streams.values()]

    given = {"a": stream.tokens(8), "b": stream.tokens(8)}
    in_turn = run("aaaabbbb")
    for order in ("abababab", "bbaabbaa"):
        for got, want in zip(run(order), in_turn, strict=True):
            same_observables(got, want, f"after calls in the order {order}")


@law("LAW-08")
def an_array_changed_afterwards_changes_nothing(stream: Stream) -> None:
    stream.subject.in_this_process()
    keys, values = stream.tokens(stream.subject.size("tokens", MANY))
    stream.need_room(len(keys))
    own_keys, own_values = (stream.subject.own(stream.laid_out(part)) for part in (keys, values))
    stream.give(own_keys, own_values)
    own_keys.fill(77.0)
    own_values.fill(77.0)
    reads(stream.subject, stream.read(), stream.expected(keys, values), "tokens whose input arrays were overwritten later")


@law("LAW-09")
def the_same_calls_give_the_same_bits(stream: Stream) -> None:
    first, keys, values = filled(stream)
    second = stream.fresh()
    second.append(keys, values)
    same_observables(second.observe(), first.observe(), "after the same calls on a second cache")


@law("LAW-13ab")
def no_tokens_change_nothing(stream: Stream) -> None:
    for count in (0, MANY):
        empty = stream.fresh()
        empty.append(*stream.tokens(count))
        before = empty.observe()
        empty.append(*stream.tokens(0))
        same_observables(empty.observe(), before, f"after an append of 0 tokens to {count}")


@law("LAW-14")
def what_is_not_finite_never_reads_back_finite(stream: Stream) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        for which in ("keys", "values"):
            stream, _, _ = filled(stream.fresh(), 2)
            rows = dict(zip(("keys", "values"), stream.tokens(1), strict=True))
            rows[which][0, -1, -1] = bad
            before = stream.observe()
            try:
                stream.append(rows["keys"], rows["values"])
            except NotOffered:
                raise
            except Exception as error:
                if "NonFinite" not in kinds_of(error):
                    raise Broken(f"{bad} in {which}", "NonFinite or no error", f"{type(error).__name__}: {error}") from error
                same_observables(stream.observe(), before, f"after {bad} was rejected")
                continue
            got = stream.read()[0 if which == "keys" else 1][-1, -1, -1]
            if np.isfinite(got):
                raise Broken(f"{which} that were appended with {bad}", "a value that is not finite", repr(float(got)))


@law("LAW-15")
def inputs_may_be_views(stream: Stream) -> None:
    subject = stream.subject
    subject.in_this_process("views of memory")

    def strided(array: NDArray) -> Own:
        wide = np.full((*array.shape[:-2], array.shape[-2] * 2, array.shape[-1] * 2), 77, np.float32)
        wide[..., ::2, ::2] = array
        return Own(subject.own(wide).array[..., ::2, ::2])

    def transposed(array: NDArray) -> Own:
        turned = subject.own(np.ascontiguousarray(np.swapaxes(array, -1, -2))).array
        if not hasattr(turned, "mT"):
            raise NotOffered("transposed views (.mT)")
        return Own(turned.mT)

    for view in (strided, transposed):
        fresh, (keys, values) = stream.fresh(), stream.tokens(subject.size("tokens", MANY))
        fresh.need_room(len(keys))
        fresh.give(view(fresh.laid_out(keys)), view(fresh.laid_out(values)))
        reads(stream.subject, fresh.read(), fresh.expected(keys, values), f"tokens appended as {view.__name__} views")
