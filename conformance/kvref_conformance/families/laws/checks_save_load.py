"""Checks of saved files for every cache with `save` and `load`, through its law adapter: MOVE, and LAW-08 for a file."""

from typing import Any

import numpy as np

from kvref_conformance.calls.recorder import OwnArray
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.testlib.assertions import assert_equal, assert_pair, blaming, may_raise, raises
from kvref_conformance.testlib.law_adapter import MANY_TOKENS, TRUNCATABLE, LawAdapter, assert_same_observables, fill_stream
from kvref_conformance.testlib.registry import law

REFUSED = ("FileDamaged", "ConfigError", "CapacityExceeded", "OutOfBlocks")  # the last two: a size in the file was changed
FLIPPED = 24  # bytes of a file that are changed, one per load
NO_CACHE = b"not a cache at all, but a text of some length, as a person would write it into a file"


def assert_same_tokens(stream: LawAdapter, other: LawAdapter, when: str) -> None:
    """Raises ClauseViolation unless two streams have the same length and read the same bits."""
    assert_equal(len(stream), len(other), f"number of tokens {when}")
    assert_pair(stream.read(), other.read(), f"the tokens {when}")


@law("MOVE-01ac", "save_unconverted")
def load_restores_what_was_saved(stream: LawAdapter) -> None:
    fill_stream(stream)
    loaded = stream.new_cache()
    loaded.load(stream.save())
    loaded.num_appended = stream.num_appended
    assert_same_observables(loaded.contents(), stream.contents(), "after load into another cache")
    more = stream.tokens(3)
    for each in (stream, loaded):
        each.append(*more)
    assert_same_tokens(loaded, stream, "after load and an append of 3")


@law("MOVE-01c", "save_unconverted", "truncatable")
def truncate_after_load_acts_as_on_the_saved_cache(stream: LawAdapter) -> None:
    for saved in stream.truncatable():
        fill_stream(saved, TRUNCATABLE)
        loaded = saved.new_cache(**saved.config)
        loaded.load(saved.save())
        loaded.num_appended = saved.num_appended
        for length in (TRUNCATABLE - 2, 4):
            more, truncated = saved.tokens(1), False
            with may_raise("NotTruncatable"):  # it may store less outside a window than the saved cache
                loaded.truncate(length)
                truncated = True
            if not truncated:
                break
            saved.truncate(length)
            assert_same_tokens(loaded, saved, f"of {saved.config}, after load and truncate to {length}")
            for each in (saved, loaded):
                each.append(*more)
            assert_same_tokens(loaded, saved, f"of {saved.config}, after load, truncate to {length} and an append")


@law("MOVE-01cd", "save_unconverted")
def load_replaces_the_contents(stream: LawAdapter) -> None:
    fill_stream(stream, 5)
    loaded, _, _ = fill_stream(stream.new_cache())
    loaded.load(stream.save())
    loaded.num_appended = stream.num_appended
    assert_same_tokens(loaded, stream, "after load into a cache with more tokens")
    for each in (stream, loaded):
        each.clear()
    assert_same_tokens(loaded, stream, "after load and clear")


@law("LAW-08", "save_unconverted")
def loaded_data_may_be_overwritten(stream: LawAdapter) -> None:
    stream.subject.require_same_process()
    fill_stream(stream)
    other, loaded, data = stream.new_cache(), stream.new_cache(), stream.subject.to_own_array(stream.save())
    other.load(stream.save())
    other.num_appended = stream.num_appended
    with blaming("MOVE-01"):
        assert_same_tokens(other, stream, "after load")
    loaded.load(data)
    loaded.num_appended = stream.num_appended
    data.fill(77)
    assert_same_tokens(loaded, stream, "after load, when the data was overwritten")


@law("MOVE-01b", "save_unconverted", "scaled_format_streams")
def save_and_load_do_not_quantize_again(stream: LawAdapter) -> None:
    for each in stream.scaled_format_streams():
        fill_stream(each, 5)
        loaded, again = each.new_cache(**each.config), each.new_cache(**each.config)
        loaded.load(each.save())
        again.load(loaded.save())
        for other, times in ((loaded, "after load"), (again, "after load, save and load")):
            assert_same_tokens(other, each, f"of {each.config} {times}")


@law("MOVE-02a", "save_unconverted")
def load_ignores_sizes_that_do_not_matter(stream: LawAdapter) -> None:
    fill_stream(stream)
    other = stream.loading_stream()
    other.require_room(MANY_TOKENS)
    other.load(stream.save())
    assert_same_tokens(other, stream, f"after load into a cache of {other.config}, saved from one of {stream.config}")


@law("MOVE-02b", "save_unconverted")
def load_of_another_shape_raises(stream: LawAdapter) -> None:
    fill_stream(stream, 3)
    data, tried = stream.save(), 0
    for other in stream.incompatible_streams():
        tried += 1
        other.append(*other.tokens(2))
        before = other.all_observables()
        with raises("ConfigError"):
            other.load(data)
        assert_same_observables(other.all_observables(), before, f"of {other.config}, after a rejected load of {stream.config}")
    if not tried:
        raise NotOffered("a cache of another shape")


@law("MOVE-03a", "save_unconverted")
def load_of_a_damaged_file_changes_nothing(stream: LawAdapter) -> None:
    fill_stream(stream, 4)
    data = stream.save()
    stream.append(*stream.tokens(2))
    before = stream.all_observables()
    places = np.unique(np.linspace(0, len(data) - 1, FLIPPED).astype(int))
    for place in places.tolist():
        changed = data.copy()
        changed[place] ^= 1 << int(stream.subject.rng.integers(8))
        assert_load_is_rejected(stream, changed, before, f"of {len(data)} bytes with byte {place} changed")


@law("MOVE-03bc", "save_unconverted")
def load_of_a_truncated_file_changes_nothing(stream: LawAdapter) -> None:
    fill_stream(stream, 4)
    data = stream.save()
    stream.append(*stream.tokens(2))
    before, end = stream.all_observables(), len(data)
    for length in dict.fromkeys((0, 1, min(8, end - 1), end // 3, end * 2 // 3, end - 1)):
        assert_load_is_rejected(stream, data[:length], before, f"of the first {length} of {end} bytes")
    assert_load_is_rejected(stream, np.concatenate([data, data[-4:]]), before, "of a file with 4 more bytes")
    assert_load_is_rejected(stream, np.zeros(end, np.uint8), before, f"of {end} zero bytes")
    assert_load_is_rejected(stream, np.frombuffer(NO_CACHE, np.uint8).copy(), before, "of a file of text")
    stream.load(data)
    assert_equal(len(stream), 4, "number of tokens after load of the whole file")


def assert_load_is_rejected(stream: LawAdapter, data: NDArray, before: dict[str, Any], what: str) -> None:
    with raises(*REFUSED):
        stream.load(data)
    assert_same_observables(stream.all_observables(), before, f"after a rejected load {what}")


@law("MOVE-04a", "save_unconverted")
def save_changes_nothing(stream: LawAdapter) -> None:
    fill_stream(stream, 5)
    before = stream.all_observables()
    stream.save()
    assert_same_observables(stream.all_observables(), before, "after save")


@law("MOVE-04b", "save_unconverted")
def saved_data_excludes_later_writes(stream: LawAdapter) -> None:
    fill_stream(stream, 5)
    before, data = stream.contents(), OwnArray(stream.save_unconverted())
    stream.append(*stream.tokens(3))
    stream.clear()
    for count in (5, 1):  # the first file has the size of `data`
        stream.append(*stream.tokens(count))
        stream.save()  # must not change `data`
    stream.load(data)
    stream.num_appended = 5
    assert_same_observables(stream.contents(), before, "after load of a file saved before other tokens were written")


@law("MOVE-07", "save_unconverted")
def load_of_an_empty_cache_empties_the_cache(stream: LawAdapter) -> None:
    nothing = stream.save()
    full, keys, values = fill_stream(stream.new_cache(), 5)
    full.load(nothing)
    full.num_appended = 0
    assert_equal(len(full), 0, "number of tokens after load of an empty cache")
    assert_same_tokens(full, stream, "after load of an empty cache")
    for each in (full, stream):
        each.append(keys, values)
    assert_same_tokens(full, stream, "after load of an empty cache and an append")
