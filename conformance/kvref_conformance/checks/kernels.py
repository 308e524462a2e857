"""KERN: moving tokens by slot, for those who have only kernels."""

from typing import Any

import numpy as np

from kvref.array import Array
from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import equal, raises, same, true
from kvref_conformance.checking.registry import check
from kvref_conformance.drivers.in_process import Handle, Own, Subject

SLOTS, HEADS, DIM, BLOCK = 12, 2, 3, 4


def bits(count: int, subject: Subject) -> NDArray:
    """float32 [count, HEADS, DIM] of any bits at all: NaN payloads, infinities, subnormals."""
    patterns = subject.rng.integers(0, 2**32, size=(count, HEADS, DIM), dtype=np.uint32)
    return patterns.view(np.float32)


def scattered(subject: Subject, store: NDArray, slots: list[int] | NDArray, new: NDArray) -> NDArray:
    """The store, in the implementation's own memory, after a scatter."""
    own = subject.own(store)
    result = _as_is(subject.new("kernels"), "scatter", own, slots, new)
    store_afterwards: NDArray = subject.implementation.to_numpy(result)
    return store_afterwards


def _as_is(kernels: Handle, name: str, *args: Any) -> Array:
    """Call a kernel, slots given as a list, and leave its result in the implementation's own memory."""
    return kernels.as_is(name, *(np.array(arg, np.int64) if isinstance(arg, list) else arg for arg in args))


def same_bits(got: NDArray, want: NDArray, what: str) -> None:
    same(np.asarray(got).view(np.uint32), np.asarray(want).view(np.uint32), what)


@check("KERN-01", "kernels")
def a_slot_is_block_and_offset(subject: Subject) -> None:
    for block_size in (3, 4):
        blocks = bits(12 // block_size * block_size, subject).reshape(-1, block_size, HEADS, DIM)
        slots, new = [11, 0, 4, 7], bits(4, subject)
        got = scattered(subject, blocks.reshape(12, HEADS, DIM), slots, new)
        for slot, token in zip(slots, new, strict=True):
            blocks[slot // block_size, slot % block_size] = token
        same_bits(got, blocks.reshape(12, HEADS, DIM), f"blocks of {block_size}, seen as slots")


@check("KERN-02", "kernels")
def a_negative_slot_is_skipped(subject: Subject) -> None:
    store, new = bits(SLOTS, subject), bits(5, subject)
    for slots in ([3, -1, 5, -1, 0], [-1] * 5, [-12, -5, 11, 2, 3]):
        want = store.copy()
        for slot, token in zip(slots, new, strict=True):
            if slot >= 0:
                want[slot] = token
        same_bits(scattered(subject, store.copy(), slots, new), want, f"the store after slots {slots}")


@check("KERN-03", "kernels")
def a_slot_past_the_end_writes_nothing(subject: Subject) -> None:
    store, new = bits(SLOTS, subject), bits(3, subject)
    for slots in ([1, 2, SLOTS], [SLOTS + 100, 1, 2], [0, 2**40, 1]):
        own = subject.own(store.copy())
        with raises("SlotOutOfRange"):
            _as_is(subject.new("kernels"), "scatter", own, slots, new)
        same_bits(subject.implementation.to_numpy(own.array), store, f"the store after slots {slots} were refused")
        with raises("SlotOutOfRange"):
            _as_is(subject.new("kernels"), "gather", own, slots)
    with raises("SlotOutOfRange"):
        _as_is(subject.new("kernels"), "gather", subject.own(store), [0, -1])


@check("KERN-03", "kernels")
def tokens_and_slots_must_match(subject: Subject) -> None:
    store = bits(SLOTS, subject)
    for slots, new in (([1, 2], bits(3, subject)), ([1, 2], bits(2, subject)[:, :1]), ([1], bits(1, subject)[:, :, :2])):
        own = subject.own(store.copy())
        with raises("ShapeMismatch"):
            _as_is(subject.new("kernels"), "scatter", own, slots, new)
        same_bits(subject.implementation.to_numpy(own.array), store, "the store after tokens of a wrong shape were refused")


@check("KERN-03", "kernels")
def tokens_of_another_dtype_are_refused(subject: Subject) -> None:
    float32, int8 = bits(SLOTS, subject), np.zeros((SLOTS, HEADS, DIM), np.int8)
    for store, new in ((int8, np.full((2, HEADS, DIM), 300.7, np.float32)), (float32, int8[:2]), (int8.view(np.uint8), int8[:2])):
        own = subject.own(store.copy())
        with raises("DtypeMismatch"):
            _as_is(subject.new("kernels"), "scatter", own, [0, 1], new)
        kept = subject.implementation.to_numpy(own.array)
        same(kept.view(np.uint8), store.view(np.uint8), f"the store of {store.dtype} after tokens of {new.dtype} were refused")


@check("KERN-04", "kernels")
def slots_not_named_keep_every_bit(subject: Subject) -> None:
    store = np.full((SLOTS, HEADS, DIM), 0x7FC12345, np.uint32).view(np.float32)
    store.view(np.uint32)[1::2] = 0xFF800001  # signalling NaNs with payloads
    slots, new = [5, 0, 11], bits(3, subject)
    want = store.copy()
    want[slots] = new
    same_bits(scattered(subject, store.copy(), slots, new), want, "a store full of NaN payloads")


@check("KERN-04", "kernels")
def an_update_touches_its_tokens_only(subject: Subject) -> None:
    buffer = bits(2 * 7, subject).reshape(2, HEADS, 7, DIM)
    for position, count in ((0, 3), (4, 3), (6, 1), (2, 0)):
        new = bits(2 * count, subject).reshape(2, HEADS, count, DIM)
        want = buffer.copy()
        want[:, :, position : position + count] = new
        result = _as_is(subject.new("kernels"), "update", buffer.copy(), new, position)
        same_bits(subject.implementation.to_numpy(result), want, f"the buffer after {count} tokens at {position}")


@check("KERN-05", "kernels")
def gather_gives_what_scatter_wrote(subject: Subject) -> None:
    for count in (0, 1, SLOTS):
        slots, new = [int(s) for s in subject.rng.permutation(SLOTS)[:count]], bits(count, subject)
        kernels = subject.new("kernels")
        store = _as_is(kernels, "scatter", bits(SLOTS, subject), slots, new)
        got = _as_is(kernels, "gather", Own(store), slots)
        same_bits(subject.implementation.to_numpy(got), new, f"{count} tokens, scattered and gathered")
        if count:
            twice = _as_is(kernels, "gather", Own(store), [slots[0], slots[0]])
            same_bits(subject.implementation.to_numpy(twice), new[[0, 0]], "one slot gathered twice")


@check("KERN-06", "kernels", slow=True)
def offsets_past_2_to_31_are_right(subject: Subject) -> None:
    width = 2**16
    slots = 2**31 // width + 4  # of uint8: a little over 2 GiB
    kernels = subject.new("kernels")
    store = subject.own(np.zeros((slots, 1, width), np.uint8))
    new = subject.rng.integers(1, 256, size=(3, 1, width), dtype=np.uint8)
    where = [2**31 // width, 2**31 // width - 1, slots - 1]
    result = Own(_as_is(kernels, "scatter", store, where, new))
    got = subject.implementation.to_numpy(_as_is(kernels, "gather", result, [*where, 0, 1]))
    same(got[:3], new, "tokens past 2^31 elements")
    equal(int(np.asarray(got[3:]).max()), 0, "what is in slots 0 and 1, which were not named")


@check("KERN-07", "kernels")
def a_repeated_slot_holds_one_token_whole(subject: Subject) -> None:
    store = np.zeros((SLOTS, HEADS, DIM), np.float32)
    new = np.arange(1, 6, dtype=np.float32)[:, None, None] * np.ones((1, HEADS, DIM), np.float32)
    got = np.asarray(scattered(subject, store, [3, 7, 3, 3, 7], new))
    for slot, owners in ((3, (1, 3, 4)), (7, (2, 5))):
        values = set(got[slot].reshape(-1).tolist())
        true(len(values) == 1 and values <= set(map(float, owners)), f"slot {slot}", f"one of the tokens {owners}, whole", values)


@check("KERN-08", "kernels")
def integers_of_any_type_are_slots(subject: Subject) -> None:
    store, new = bits(SLOTS, subject), bits(3, subject)
    want = store.copy()
    want[[11, 0, 5]] = new
    for dtype in (np.int8, np.int32, np.uint8):
        slots = np.array([11, 0, 5], dtype)
        same_bits(scattered(subject, store.copy(), slots, new), want, f"the store after slots of {slots.dtype}")
        got = _as_is(subject.new("kernels"), "gather", want, slots)
        same_bits(subject.implementation.to_numpy(got), new, f"what is gathered from slots of {slots.dtype}")


@check("KERN-08", "kernels")
def other_slots_are_refused(subject: Subject) -> None:
    store, two = bits(SLOTS, subject), bits(2, subject)
    whole, mask = np.array([1.0, 2.0], np.float32), np.array([True, False])
    square, one = np.array([[1, 2], [3, 4]]), np.array([[3], [4]])
    for slots, kind in ((whole, "DtypeMismatch"), (whole + np.float32(0.9), "DtypeMismatch"), (mask, "DtypeMismatch"),
                        (square, "ShapeMismatch"), (one, "ShapeMismatch"), (np.array(1), "ShapeMismatch")):  # fmt: skip
        refused(subject, store, slots, two, kind)


@check("KERN-08", "kernels")
def an_unsigned_slot_is_never_negative(subject: Subject) -> None:
    store = bits(SLOTS, subject)
    for bits_of_slot in (64, 32, 16, 8):
        for last in (2**bits_of_slot - 1, 2 ** (bits_of_slot - 1)):  # signed they would be -1, which is skipped, and the least
            slots = np.array([0, last], f"uint{bits_of_slot}")
            refused(subject, store, slots, bits(2, subject), "SlotOutOfRange")


def refused(subject: Subject, store: NDArray, slots: NDArray, new: NDArray, kind: str) -> None:
    """Neither scattering nor gathering takes these slots, and the store stays as it is."""
    kernels, own = subject.new("kernels"), subject.own(store.copy())
    with raises(kind):
        kernels.as_is("scatter", own, slots, new)
    with raises(kind):
        kernels.as_is("gather", own, slots)
    same_bits(subject.implementation.to_numpy(own.array), store, f"the store after slots {slots.tolist()} of {slots.dtype}")
