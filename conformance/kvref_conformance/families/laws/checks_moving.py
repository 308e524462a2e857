"""Checks of MOVE for every cache with `save` and `load`, through its Stream."""

from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import equal, pair, raises
from kvref_conformance.checking.registry import law
from kvref_conformance.checking.streams import MANY, Stream, filled, same_observables
from kvref_conformance.conversation.calls import Own
from kvref_conformance.outcome import NotOffered

REFUSED = ("FileDamaged", "ConfigError", "CapacityExceeded", "OutOfBlocks")  # the last two: a size in the file was changed
FLIPPED = 24  # bytes of a file that are changed, one per load
TEXT = b"not a cache at all, but a text of some length, as a person would write it into a file"


def seen(stream: Stream) -> dict[str, Any]:
    """Returns the observables that do not depend on how much memory the contents take."""
    room = ("num_free_blocks", "utilization", "blocks of")
    return {name: what for name, what in stream.observe().items() if not name.startswith(room)}


def is_as(stream: Stream, other: Stream, when: str) -> None:
    """Raises Broken unless two streams have the same length and read the same bits."""
    equal(len(stream), len(other), f"number of tokens {when}")
    pair(stream.read(), other.read(), f"the tokens {when}")


@law("MOVE-01ac", "saved_as_is")
def what_is_loaded_reads_as_what_was_saved(stream: Stream) -> None:
    filled(stream)
    loaded = stream.fresh()
    loaded.load(stream.saved())
    loaded.taken = stream.taken
    same_observables(seen(loaded), seen(stream), "after load into another cache")
    more = stream.tokens(3)
    for each in (stream, loaded):
        each.append(*more)
    is_as(loaded, stream, "after load and an append of 3")


@law("MOVE-01cd", "saved_as_is")
def what_is_loaded_takes_the_place_of_what_was_there(stream: Stream) -> None:
    filled(stream, 5)
    loaded, _, _ = filled(stream.fresh())
    loaded.load(stream.saved())
    loaded.taken = stream.taken
    is_as(loaded, stream, "after load into a cache with more tokens")
    for each in (stream, loaded):
        each.forget()
    is_as(loaded, stream, "after load and clear")


@law("LAW-08", "saved_as_is")
def data_that_is_overwritten_after_load_changes_nothing(stream: Stream) -> None:
    stream.subject.in_this_process()
    filled(stream)
    loaded, data = stream.fresh(), stream.subject.own(stream.saved())
    loaded.load(data)
    loaded.taken = stream.taken
    data.fill(77)
    is_as(loaded, stream, "after load, when the data was overwritten")


@law("MOVE-01b", "saved_as_is", "in_formats")
def nothing_is_quantized_again(stream: Stream) -> None:
    for each in stream.in_formats():
        filled(each, 5)
        loaded, again = each.fresh(**each.config), each.fresh(**each.config)
        loaded.load(each.saved())
        again.load(loaded.saved())
        for other, times in ((loaded, "after load"), (again, "after load, save and load")):
            is_as(other, each, f"of {each.config} {times}")


@law("MOVE-02a", "saved_as_is")
def it_is_loaded_where_other_sizes_do_not_matter(stream: Stream) -> None:
    filled(stream)
    other = stream.elsewhere()
    other.need_room(MANY)
    other.load(stream.saved())
    is_as(other, stream, f"after load into a cache of {other.config}, saved from one of {stream.config}")


@law("MOVE-02b", "saved_as_is")
def another_shape_is_refused(stream: Stream) -> None:
    filled(stream, 3)
    data, tried = stream.saved(), 0
    for other in stream.unlike():
        tried += 1
        other.append(*other.tokens(2))
        before = other.observe()
        with raises("ConfigError"):
            other.load(data)
        same_observables(other.observe(), before, f"of {other.config}, after a rejected load of {stream.config}")
    if not tried:
        raise NotOffered("a cache of another shape")


@law("MOVE-03a", "saved_as_is")
def a_damaged_file_changes_nothing(stream: Stream) -> None:
    filled(stream, 4)
    data = stream.saved()
    stream.append(*stream.tokens(2))
    before = stream.observe()
    places = np.unique(np.linspace(0, len(data) - 1, FLIPPED).astype(int))
    for place in places.tolist():
        changed = data.copy()
        changed[place] ^= 1 << int(stream.subject.rng.integers(8))
        refuses(stream, changed, before, f"of {len(data)} bytes with byte {place} changed")


@law("MOVE-03bc", "saved_as_is")
def a_file_cut_short_changes_nothing(stream: Stream) -> None:
    filled(stream, 4)
    data = stream.saved()
    stream.append(*stream.tokens(2))
    before, end = stream.observe(), len(data)
    for length in dict.fromkeys((0, 1, min(8, end - 1), end // 3, end * 2 // 3, end - 1)):
        refuses(stream, data[:length], before, f"of the first {length} of {end} bytes")
    refuses(stream, np.concatenate([data, data[-4:]]), before, "of a file with 4 more bytes")
    refuses(stream, np.zeros(end, np.uint8), before, f"of {end} zero bytes")
    refuses(stream, np.frombuffer(TEXT, np.uint8).copy(), before, "of a file of text")
    stream.load(data)
    equal(len(stream), 4, "number of tokens after load of the whole file")


def refuses(stream: Stream, data: NDArray, before: dict[str, Any], what: str) -> None:
    with raises(*REFUSED):
        stream.load(data)
    same_observables(stream.observe(), before, f"after a rejected load {what}")


@law("MOVE-04a", "saved_as_is")
def saving_has_no_effect(stream: Stream) -> None:
    filled(stream, 5)
    before = stream.observe()
    stream.saved()
    same_observables(stream.observe(), before, "after save")


@law("MOVE-04b", "saved_as_is")
def later_writes_are_not_in_it(stream: Stream) -> None:
    filled(stream, 5)
    before, data = seen(stream), Own(stream.saved_as_is())
    stream.append(*stream.tokens(3))
    stream.forget()
    stream.append(*stream.tokens(6))
    stream.saved()  # must not change `data`
    stream.load(data)
    stream.taken = 5
    same_observables(seen(stream), before, "after load of a file saved before other tokens were written")


@law("MOVE-07", "saved_as_is")
def nothing_is_loaded_as_nothing(stream: Stream) -> None:
    nothing = stream.saved()
    full, keys, values = filled(stream.fresh(), 5)
    full.load(nothing)
    full.taken = 0
    equal(len(full), 0, "number of tokens after load of an empty cache")
    is_as(full, stream, "after load of an empty cache")
    for each in (full, stream):
        each.append(keys, values)
    is_as(full, stream, "after load of an empty cache and an append")
