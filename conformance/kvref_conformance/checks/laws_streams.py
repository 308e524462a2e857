"""LAW: what holds for every cache, checked on each through one face."""

from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import equal, pair, reads, same
from kvref_conformance.checking.registry import CACHES, check, check_each
from kvref_conformance.checking.setup import pair_of_tokens
from kvref_conformance.checking.streams import Stream
from kvref_conformance.drivers.in_process import Own, Subject
from kvref_conformance.exchange import kinds_of
from kvref_conformance.outcome import Broken, NotOffered

MANY = 11  # tokens: more than a block, a tail, an initial capacity


def same_observables(got: dict[str, Any], want: dict[str, Any], when: str) -> None:
    for name in want:
        (same if name in ("keys", "values") else equal)(got[name], want[name], f"{name} {when}")


def filled(subject: Subject, family: str, count: int = MANY) -> tuple[Stream, NDArray, NDArray]:
    stream, (keys, values) = Stream(subject, family), pair_of_tokens(subject, count)
    stream.append(keys, values)
    return stream, keys, values


@check_each("LAW-02", *CACHES)
def keys_and_values_are_stored_apart(subject: Subject, family: str) -> None:
    stream, (keys, values) = Stream(subject, family), pair_of_tokens(subject, MANY)
    stream.append(keys, np.zeros_like(values))
    reads(subject, stream.read(), stream.expected(keys, np.zeros_like(values)), "tokens whose values are all zero")


@check_each("LAW-02", *CACHES)
def two_caches_share_nothing(subject: Subject, family: str) -> None:
    first, keys, values = filled(subject, family)
    second, _, _ = filled(subject, family)
    second.append(*pair_of_tokens(subject, 2))
    reads(subject, first.read(), first.expected(keys, values), "a cache after another was filled")


@check_each("LAW-04", *CACHES)
def what_is_read_is_what_was_written(subject: Subject, family: str) -> None:
    stream, keys, values = filled(subject, family)
    equal(len(stream), MANY, "tokens held")
    reads(subject, stream.read(), stream.expected(keys, values), f"{MANY} tokens appended")
    more_keys, more_values = pair_of_tokens(subject, 3)
    stream.append(more_keys, more_values)
    all_keys, all_values = np.concatenate([keys, more_keys]), np.concatenate([values, more_values])
    reads(subject, stream.read(), stream.expected(all_keys, all_values), f"{MANY + 3} tokens appended")


@check_each("LAW-05", *CACHES)
def nothing_of_the_last_owner_is_left(subject: Subject, family: str) -> None:
    stream, _, _ = filled(subject, family)
    stream.forget()
    equal(len(stream), 0, "tokens held after forgetting them")
    keys, values = pair_of_tokens(subject, 2)
    stream.append(keys, values)
    reads(subject, stream.read(), stream.expected(keys, values), "2 tokens in a cache that was emptied")


@check_each("LAW-06", *CACHES)
def pieces_leave_what_the_whole_leaves(subject: Subject, family: str) -> None:
    whole, keys, values = filled(subject, family)
    for size in (1, 2, 4, 7):
        pieces = Stream(subject, family)
        for start in range(0, MANY, size):
            pieces.append(keys[start : start + size], values[start : start + size])
        same_observables(pieces.observe(), whole.observe(), f"appended {size} at a time")


@check_each("LAW-07", *CACHES)
def two_streams_can_take_turns(subject: Subject, family: str) -> None:
    def run(order: str) -> list[dict[str, Any]]:
        streams = {"a": Stream(subject, family), "b": Stream(subject, family)}
        if family == "paged":  # two sequences of one cache
            streams["b"] = streams["a"].beside(streams["a"].cache.create(), 0)
        done = {"a": 0, "b": 0}
        for name in order:
            rows, at = given[name], done[name]
            streams[name].append(rows[0][at : at + 2], rows[1][at : at + 2])
            done[name] += 2
        return [stream.observe() for stream in streams.values()]

    given = {"a": pair_of_tokens(subject, 8), "b": pair_of_tokens(subject, 8)}
    in_turn = run("aaaabbbb")
    for order in ("abababab", "bbaabbaa"):
        for got, want in zip(run(order), in_turn, strict=True):
            same_observables(got, want, f"in the order {order}")


@check_each("LAW-08", *CACHES)
def an_array_changed_afterwards_changes_nothing(subject: Subject, family: str) -> None:
    subject.in_this_process()
    stream, (keys, values) = Stream(subject, family), pair_of_tokens(subject, MANY)
    own_keys, own_values = (subject.own(stream.laid_out(part)) for part in (keys, values))
    stream.give(own_keys, own_values)
    own_keys.fill(77.0)
    own_values.fill(77.0)
    reads(subject, stream.read(), stream.expected(keys, values), "tokens whose arrays were overwritten afterwards")


@check_each("LAW-09", *CACHES)
def the_same_calls_give_the_same_bits(subject: Subject, family: str) -> None:
    first, keys, values = filled(subject, family)
    second = Stream(subject, family)
    second.append(keys, values)
    same_observables(second.observe(), first.observe(), "the second time")


@check_each("LAW-13", *CACHES)
def no_tokens_change_nothing(subject: Subject, family: str) -> None:
    for count in (0, MANY):
        stream = Stream(subject, family)
        stream.append(*pair_of_tokens(subject, count))
        before = stream.observe()
        stream.append(*pair_of_tokens(subject, 0))
        same_observables(stream.observe(), before, f"after appending no token to {count}")


@check("LAW-13", "quantized")
def reading_no_positions_gives_no_tokens(subject: Subject) -> None:
    stream, _, _ = filled(subject, "quantized")
    keys, values = stream.cache.read_tokens(0, [])
    equal((len(keys), len(values)), (0, 0), "tokens read at no positions")


@check_each("LAW-14", *CACHES)
def what_is_not_finite_never_reads_back_finite(subject: Subject, family: str) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        for which in ("keys", "values"):
            stream, _, _ = filled(subject, family, 2)
            rows = dict(zip(("keys", "values"), pair_of_tokens(subject, 1), strict=True))
            rows[which][0, 1, 2] = bad
            before = stream.observe()
            try:
                stream.append(rows["keys"], rows["values"])
            except NotOffered:
                raise
            except Exception as error:
                if "NonFinite" not in kinds_of(error):
                    raise Broken(f"{bad} in {which}", "NonFinite or no error", f"{type(error).__name__}: {error}") from error
                same_observables(stream.observe(), before, f"after {bad} was refused")
                continue
            got = stream.read()[0 if which == "keys" else 1][-1, 1, 2]
            if np.isfinite(got):
                raise Broken(f"{which} appended as {bad}", "a value that is not finite", repr(float(got)))


@check_each("LAW-15", *CACHES)
def inputs_may_be_views(subject: Subject, family: str) -> None:
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
        stream, (keys, values) = Stream(subject, family), pair_of_tokens(subject, MANY)
        stream.give(view(stream.laid_out(keys)), view(stream.laid_out(values)))
        reads(subject, stream.read(), stream.expected(keys, values), f"tokens given as {view.__name__} views")


@check("LAW-14", "elements")
def an_infinity_never_decodes_to_a_number(subject: Subject) -> None:
    elements = subject.new("elements")
    for name in subject.formats("float8_e4m3fn", "float8_e5m2"):
        special = np.array([np.nan, np.inf, -np.inf], np.float32)
        got = elements.decode(elements.encode(special, name), name)
        for value, back in zip(special, got, strict=True):
            if np.isfinite(back):
                raise Broken(f"{value} through {name}", "a value that is not finite", repr(float(back)))


@check("LAW-02", "paged")
def sequences_and_layers_are_apart(subject: Subject) -> None:
    streams, rows = [], []
    first = Stream(subject, "paged")
    for sequence in (first.sequence, first.cache.create()):
        for layer in (0, 1):
            streams.append(first.beside(sequence, layer))
            rows.append(pair_of_tokens(subject, 7))
    for at in range(7):
        for stream, (keys, values) in zip(streams, rows, strict=True):
            stream.append(keys[at : at + 1], values[at : at + 1])
    streams[0].cache.write(streams[0].sequence, 0, 2, rows[0][0][5:6], rows[0][1][5:6])
    rows[0][0][2], rows[0][1][2] = rows[0][0][5], rows[0][1][5]
    for stream, wanted in zip(streams, rows, strict=True):
        pair(stream.read(), wanted, f"sequence {stream.sequence}, layer {stream.layer}")


@check("LAW-02", "quantized")
def layers_are_apart(subject: Subject) -> None:
    stream, keys, values = filled(subject, "quantized")
    stream.cache.append(1, *pair_of_tokens(subject, 1))
    equal(stream.cache.length(0), MANY, "length of layer 0 after an append to layer 1")
    reads(subject, stream.read(), stream.expected(keys, values), "layer 0 after an append to layer 1")
