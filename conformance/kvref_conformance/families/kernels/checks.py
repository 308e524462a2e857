"""Checks of KERN: kernels that move tokens by slot."""

from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from kvref.array import Array
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.recorder import OwnArray
from kvref_conformance.calls.subject import Subject, narrow_dtype
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats.small_floats import round_to
from kvref_conformance.testlib.assertions import KeptResults, assert_equal, assert_same, assert_true, raises
from kvref_conformance.testlib.fixtures import strided_view
from kvref_conformance.testlib.production_sizes import HEAD_DIMS
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.tagged_content import KEYS, token_content
from kvref_conformance.testlib.thread_stress import NUM_THREADS, assert_threads_do_not_interfere

MAX_STORE_BYTES = 2**28  # of a store at production sizes
SLOTS = 12  # at least; rounded up to full blocks
INTEGERS = [np.dtype(f"{kind}{width}") for width in (8, 16, 32, 64) for kind in ("int", "uint")]
NANS = {  # a quiet and a signaling NaN with payloads, per dtype
    "float32": (0x7FC12345, 0xFF800001), "float16": (0x7E12, 0xFC01), "bfloat16": (0x7FC1, 0xFF81),
}  # fmt: skip


def shape(subject: Subject) -> tuple[int, int]:
    """Returns num_kv_heads and head_dim of a token."""
    return subject.heads, subject.size("head_dim", 3)


def num_slots(subject: Subject, least: int = SLOTS) -> int:
    """Returns the least number of slots, rounded up to a multiple of the block size."""
    size = subject.size("block_size", 3)
    return -(-least // size) * size


def dtype_of(subject: Subject) -> tuple[Any, Any]:
    """Returns the dtype of stores, and the unsigned integer dtype of the same width."""
    if subject.dtype == "float32":
        return np.float32, np.uint32
    return narrow_dtype(subject.dtype), np.uint16


def bits(count: int, subject: Subject) -> NDArray:
    """Returns [count, num_kv_heads, head_dim] of random bits, including NaN payloads, infinities and subnormals."""
    dtype, integers = dtype_of(subject)
    end = int(np.iinfo(integers).max) + 1
    patterns: NDArray = subject.rng.integers(0, end, size=(count, *shape(subject)), dtype=integers)
    return patterns.view(dtype)


def filled_store(subject: Subject) -> NDArray:
    return bits(num_slots(subject), subject)


def scatter(subject: Subject, store: NDArray, slots: list[int] | NDArray, new: NDArray) -> NDArray:
    """Returns the store after a scatter in the implementation's memory."""
    after: NDArray = subject.implementation.to_numpy(
        as_is(subject.new("kernels"), "scatter", subject.to_own_array(store), slots, new)
    )
    return after


def as_is(kernels: ObjectProxy, name: str, *args: Any) -> Array:
    """Calls a kernel with slots as a list or array. The result is not converted to NumPy."""
    return kernels.as_is(name, *(np.array(arg, np.int64) if isinstance(arg, list) else arg for arg in args))


def same_bits(got: NDArray, want: NDArray, what: str) -> None:
    assert_same(_patterns(got), _patterns(want), what)


def _patterns(array: NDArray) -> NDArray:
    """Returns the bits as integers. A bfloat16 becomes the upper half of a float32, as which some libraries return it."""
    array = np.ascontiguousarray(array)
    if array.dtype.itemsize == 1:
        return array
    return array.view(np.uint32) if array.dtype.itemsize == 4 else array.view(np.uint16).astype(np.uint32) << 16


def assert_rejected(subject: Subject, kind: str, store: NDArray, name: str, *args: Any) -> None:
    """Raises ClauseViolation unless the kernel raises `kind` and leaves the store unchanged."""
    own = subject.to_own_array(store.copy())
    with raises(kind):
        as_is(subject.new("kernels"), name, own, *args)
    same_bits(subject.implementation.to_numpy(own.array), store, f"store of {store.dtype} after {name} raised {kind}")


@check("KERN-01", "kernels")
def scatter_addresses_a_slot_by_block_and_offset(subject: Subject) -> None:
    for block_size in dict.fromkeys(subject.size("block_size", wanted) for wanted in (3, 4)):
        num_blocks = -(-SLOTS // block_size)
        blocks = bits(num_blocks * block_size, subject).reshape(num_blocks, block_size, *shape(subject))
        slots, new = [11, 0, 4, 7], bits(4, subject)
        got = scatter(subject, blocks.reshape(-1, *shape(subject)).copy(), slots, new)
        for slot, token in zip(slots, new, strict=True):
            blocks[slot // block_size, slot % block_size] = token
        same_bits(got, blocks.reshape(-1, *shape(subject)), f"slots gathered from blocks of {block_size}")


@check("KERN-02", "kernels")
def scatter_skips_negative_slots(subject: Subject) -> None:
    require_negative_slots(subject)
    store, new = filled_store(subject), bits(5, subject)
    for slots in ([3, -1, 5, -1, 0], [-1] * 5, [-12, -5, 11, 2, 3]):
        want = store.copy()
        for slot, token in zip(slots, new, strict=True):
            if slot >= 0:
                want[slot] = token
        same_bits(scatter(subject, store.copy(), slots, new), want, f"the store after scatter to slots {slots}")


@check("KERN-03a", "kernels")
def scatter_and_gather_past_the_end_raise_and_change_nothing(subject: Subject) -> None:
    store, new = filled_store(subject), bits(3, subject)
    for slots in ([1, 2, len(store)], [len(store) + 100, 1, 2], [0, 2**40, 1], [len(store)]):
        assert_slots_rejected(subject, store, np.array(slots), new[: len(slots)], "SlotOutOfRange")


@check("KERN-03b", "kernels")
def gather_of_a_negative_slot_raises(subject: Subject) -> None:
    require_negative_slots(subject)
    assert_rejected(subject, "SlotOutOfRange", filled_store(subject), "gather", [0, -1])


@check("KERN-03c", "kernels")
def scatter_of_a_wrong_shape_raises(subject: Subject) -> None:
    store = filled_store(subject)
    for slots, new in (([1, 2], bits(3, subject)), ([1, 2], bits(2, subject)[:, 1:]), ([1], bits(1, subject)[..., 1:])):
        assert_rejected(subject, "ShapeMismatch", store, "scatter", slots, new)


@check("KERN-03d", "kernels")
def scatter_of_another_dtype_raises(subject: Subject) -> None:
    floats, numbers = filled_store(subject), np.full((2, *shape(subject)), 300.7, dtype_of(subject)[0])
    int8 = np.zeros(floats.shape, np.int8)
    for store, new in ((int8, numbers), (floats, int8[:2]), (int8.view(np.uint8), int8[:2])):
        assert_rejected(subject, "DtypeMismatch", store, "scatter", [0, 1], new)


@check("KERN-04a", "kernels")
def scatter_changes_no_bit_of_other_slots(subject: Subject) -> None:
    dtype, integers = dtype_of(subject)
    quiet, signalling = NANS[subject.dtype]
    store = np.full((num_slots(subject), *shape(subject)), quiet, integers).view(dtype)
    store.view(integers)[1::2] = signalling
    slots, new = [5, 0, 11], bits(3, subject)
    want = store.copy()
    want[slots] = new
    same_bits(scatter(subject, store.copy(), slots, new), want, "a store of NaN payloads after scatter to other slots")


@check("KERN-04b", "kernels")
def update_writes_its_tokens_only(subject: Subject) -> None:
    batch, (heads, dim) = subject.size("batch_size", 2), shape(subject)
    buffer = bits(batch * 7, subject).reshape(batch, heads, 7, dim)
    for position, count in ((0, 3), (4, 3), (6, 1), (2, 0)):
        new = bits(batch * count, subject).reshape(batch, heads, count, dim)
        want = buffer.copy()
        want[:, :, position : position + count] = new
        result = as_is(subject.new("kernels"), "update", buffer.copy(), new, position)
        same_bits(subject.implementation.to_numpy(result), want, f"the buffer after update with {count} tokens at {position}")


@check("KERN-05", "kernels")
def gather_returns_the_scattered_tokens(subject: Subject) -> None:
    total = num_slots(subject)
    for count in (0, 1, total):
        slots, new = [int(s) for s in subject.rng.permutation(total)[:count]], bits(count, subject)
        kernels = subject.new("kernels")
        store = as_is(kernels, "scatter", filled_store(subject), slots, new)
        got = as_is(kernels, "gather", OwnArray(store), slots)
        same_bits(subject.implementation.to_numpy(got), new, f"{count} tokens, scattered and gathered")
        if count:
            twice = as_is(kernels, "gather", OwnArray(store), [slots[0], slots[0]])
            same_bits(subject.implementation.to_numpy(twice), new[[0, 0]], "one slot gathered twice")


@check("KERN-06", "kernels", slow=True)
def scatter_and_gather_reach_past_2_to_31_elements(subject: Subject) -> None:
    heads, dim = subject.size("num_kv_heads", 1), subject.size("head_dim", 2**16)
    slots = 2**31 // (heads * dim) + 4  # a little over 2 GiB if the dtype is uint8
    dtype = np.uint8 if subject.limits.limit("kernels", "dtype").allows("uint8") else dtype_of(subject)[0]
    kernels = subject.new("kernels")
    store = subject.to_own_array(np.zeros((slots, heads, dim), dtype))
    new = subject.rng.integers(1, 256, size=(3, heads, dim)).astype(dtype)
    where = [slots - 4, slots - 5, slots - 1]
    result = OwnArray(as_is(kernels, "scatter", store, where, new))
    got = subject.implementation.to_numpy(as_is(kernels, "gather", result, [*where, 0, 1]))
    assert_same(got[:3], new, "tokens past 2^31 elements")
    assert_equal(int(np.asarray(got[3:]).max()), 0, "the largest number in slots 0 and 1, which were not written")


@check("KERN-07", "kernels")
def scatter_to_a_repeated_slot_stores_one_whole_token(subject: Subject) -> None:
    dtype, _ = dtype_of(subject)
    store = np.zeros((num_slots(subject), *shape(subject)), dtype)
    new = np.broadcast_to(np.arange(1, 6)[:, None, None], (5, *shape(subject))).astype(dtype)
    got = np.asarray(scatter(subject, store, [3, 7, 3, 3, 7], new))
    for slot, owners in ((3, (1, 3, 4)), (7, (2, 5))):
        values = set(got[slot].reshape(-1).tolist())
        whole = len(values) == 1 and values <= set(map(float, owners))
        assert_true(whole, f"slot {slot} after scatter of several tokens to it", f"exactly one of tokens {owners}", values)


@check("KERN-08a", "kernels")
def scatter_and_gather_accept_slots_of_any_integer_type(subject: Subject) -> None:
    """The offset of the last slot is beyond an integer of 8 bits."""
    store, new = bits(num_slots(subject, 128), subject), bits(3, subject)
    for integer in INTEGERS:
        slots = np.array([min(np.iinfo(integer).max, len(store) - 1), 0, 5], integer)
        want = store.copy()
        want[slots.astype(np.int64)] = new
        same_bits(scatter(subject, store.copy(), slots, new), want, f"the store after scatter with slots of {integer}")
        got = as_is(subject.new("kernels"), "gather", want, slots)
        same_bits(subject.implementation.to_numpy(got), new, f"tokens gathered with slots of {integer}")


@check("KERN-09a", "kernels")
def copy_accepts_blocks_of_any_integer_type(subject: Subject) -> None:
    """The offset of the last block is beyond an integer of 8 bits."""
    size = subject.size("block_size", 3)
    store = bits(128 * size, subject)
    for integer in INTEGERS:
        sources, targets = np.array([100, 2], integer), np.array([0, 127], integer)
        want = store.reshape(128, size, *shape(subject)).copy()
        want[[0, 127]] = want[[100, 2]]
        got = copy_blocks(subject, store.copy(), sources, targets, size)
        same_bits(got, want.reshape(store.shape), f"the store after copy between blocks of {integer}")


@check("KERN-08b", "kernels")
def scatter_and_gather_reject_malformed_slots(subject: Subject) -> None:
    store, two = filled_store(subject), bits(2, subject)
    whole, mask = np.array([1.0, 2.0], np.float32), np.array([True, False])
    square, one = np.array([[1, 2], [3, 4]]), np.array([[3], [4]])
    for slots, kind in ((whole, "DtypeMismatch"), (whole + np.float32(0.9), "DtypeMismatch"), (mask, "DtypeMismatch"),
                        (square, "ShapeMismatch"), (one, "ShapeMismatch"), (np.array(1), "ShapeMismatch")):  # fmt: skip
        assert_slots_rejected(subject, store, slots, two, kind)


@check("KERN-08c", "kernels")
def scatter_and_gather_reject_large_unsigned_slots(subject: Subject) -> None:
    store = filled_store(subject)
    for bits_of_slot in (64, 32, 16, 8):
        for last in (2**bits_of_slot - 1, 2 ** (bits_of_slot - 1)):  # as signed integers: -1 and the least
            slots = np.array([0, last], f"uint{bits_of_slot}")
            assert_slots_rejected(subject, store, slots, bits(2, subject), "SlotOutOfRange")


def require_negative_slots(subject: Subject) -> None:
    """Raises NotOffered if the type of its slots has no negative numbers."""
    if not subject.limits.switch("kernels", "negative_integers"):
        raise NotOffered("negative slots: its integer type has none")


def assert_slots_rejected(subject: Subject, store: NDArray, slots: NDArray, new: NDArray, kind: str) -> None:
    assert_rejected(subject, kind, store, "scatter", slots, new)
    assert_rejected(subject, kind, store, "gather", slots)


@check("LAW-15", "kernels")
def scatter_and_gather_accept_views(subject: Subject) -> None:
    store, new, slots = filled_store(subject), bits(3, subject), np.array([5, 0, 11])
    want = store.copy()
    want[slots] = new
    kernels = subject.new("kernels")
    for numbers in (slots, strided_view(subject, slots)):
        got = as_is(kernels, "scatter", subject.to_own_array(store.copy()), numbers, strided_view(subject, new))
        same_bits(subject.implementation.to_numpy(got), want, "the store after scatter of a strided view")
        got = as_is(kernels, "gather", strided_view(subject, want), numbers)
        same_bits(subject.implementation.to_numpy(got), new, "tokens gathered from a strided view of a store")


@check("LAW-17", "kernels")
def gather_results_stay_after_later_calls(subject: Subject) -> None:
    kept, kernels, store = KeptResults(subject), subject.new("kernels"), filled_store(subject)
    for slots in ([3, 1, 4], [5, 9, 2], [0, 6, 7]):
        kept.add(f"gather of slots {slots}", as_is(kernels, "gather", store, slots))
    as_is(kernels, "scatter", subject.to_own_array(store), [3, 1, 4], bits(3, subject))
    kept.assert_unchanged()


@check("LAW-21a", "kernels")
def kernels_in_threads_move_what_they_move_alone(subject: Subject) -> None:
    kernels = subject.new("kernels")

    def move(store: NDArray, slots: list[int], new: NDArray) -> list[NDArray]:
        own = subject.to_own_array(store.copy())
        after = as_is(kernels, "scatter", own, slots, new)
        results = [after, as_is(kernels, "gather", store, slots)]
        with suppress(NotOffered):
            results.append(
                as_is(kernels, "copy", subject.to_own_array(store.copy()), [0, 1], [2, 3], subject.size("block_size", 3))
            )
        return [_patterns(subject.implementation.to_numpy(each)) for each in results]

    calls = []
    for _ in range(NUM_THREADS):
        slots = subject.rng.permutation(num_slots(subject, 300))[:200].tolist()
        calls.append([partial(move, bits(num_slots(subject, 300), subject), slots, bits(200, subject))])
    assert_threads_do_not_interfere(subject, calls, "scatter, gather and copy")


# Checks of KERN-09: copies of blocks of slots.


def copy_blocks(subject: Subject, store: NDArray, sources: Any, targets: Any, block_size: int) -> NDArray:
    """Returns the store after a copy in the implementation's memory."""
    result = as_is(subject.new("kernels"), "copy", subject.to_own_array(store), sources, targets, block_size)
    after: NDArray = subject.implementation.to_numpy(result)
    return after


@check("KERN-09a", "kernels")
def copy_preserves_every_bit(subject: Subject) -> None:
    for sources, targets in (([0], [2]), ([3, 1], [0, 2]), ([1, 1, 1], [3, 0, 2]), ([2], [2]), ([], [])):
        assert_copy(subject, sources, targets)


@check("KERN-09b", "kernels")
def copy_reads_a_block_before_overwriting_it(subject: Subject) -> None:
    for sources, targets in (([0, 1, 2], [1, 2, 3]), ([3, 2, 1], [2, 1, 0]), ([0, 1], [1, 0]), ([2, 0, 3, 1], [0, 1, 2, 3])):
        assert_copy(subject, sources, targets)


def assert_copy(subject: Subject, sources: list[int], targets: list[int]) -> None:
    """Checks a copy between four blocks."""
    size = subject.size("block_size", 3)
    store = bits(4 * size, subject).reshape(4, size, *shape(subject))
    want = store.copy()
    want[targets] = store[sources]
    got = copy_blocks(subject, store.reshape(-1, *shape(subject)), sources, targets, size)
    same_bits(got, want.reshape(got.shape), f"store after copy of {sources} to {targets}")


@check("KERN-09c", "kernels")
def copy_to_a_repeated_target_stores_one_whole_block(subject: Subject) -> None:
    size, (dtype, _) = subject.size("block_size", 3), dtype_of(subject)
    numbers = np.repeat(np.arange(1, 5), size)[:, None, None]
    store = np.broadcast_to(numbers, (4 * size, *shape(subject))).astype(dtype)
    got = np.asarray(copy_blocks(subject, store, [0, 1, 2, 1], [3, 3, 0, 3], size))
    values = set(got[3 * size :].reshape(-1).tolist())
    whole, what = len(values) == 1 and values <= {1.0, 2.0}, "after copy of [0, 1, 2, 1] to [3, 3, 0, 3]"
    assert_true(whole, f"block 3 {what}", "the value of block 0 or of block 1 in every element", values)
    assert_same(got[:size], store[2 * size : 3 * size], f"block 0 {what}, compared with block 2 before")


@check("KERN-09d", "kernels")
def copy_of_invalid_blocks_raises_and_changes_nothing(subject: Subject) -> None:
    size = subject.size("block_size", 3)
    store = bits(4 * size - 1, subject)  # the last block lacks a slot
    wrong: list[tuple[Any, Any, str]] = [
        ([0, 4], [1, 2], "SlotOutOfRange"), ([0, 1], [2, 4], "SlotOutOfRange"), ([0, 3], [1, 2], "SlotOutOfRange"),
        ([3], [0], "SlotOutOfRange"), ([0], [3], "SlotOutOfRange"), ([4], [0], "SlotOutOfRange"), ([0], [4], "SlotOutOfRange"),
        ([0, 1], [2, 3], "SlotOutOfRange"), ([0, 1], [2], "ShapeMismatch"), ([0], [1, 2], "ShapeMismatch"),
        (np.array([0.0, 1.0], np.float32), [1, 2], "DtypeMismatch"), ([0, 1], np.array([True, False]), "DtypeMismatch"),
        (np.array([0, 2**32 - 1], np.uint32), [1, 2], "SlotOutOfRange"),
    ]  # fmt: skip
    if subject.limits.switch("kernels", "negative_integers"):
        wrong += [([0, -1], [1, 2], "SlotOutOfRange"), ([0, 1], [2, -1], "SlotOutOfRange")]
    for sources, targets, kind in wrong:
        assert_rejected(subject, kind, store, "copy", sources, targets, size)


# Checks of LAW-18: kernels at production sizes.


def tokens_of_slots(subject: Subject, slots: NDArray, heads: int, dim: int) -> NDArray:
    """Returns float32 [n, heads, dim]: the token that belongs in each slot, rounded to the dtype of array arguments."""
    rounded: NDArray = round_to(token_content(0, 0, slots, heads, dim, KEYS), subject.limits.dtypes("kernels")[0])
    return rounded


def empty_store(num_slots: int, heads: int, dim: int) -> NDArray:
    """Returns float32 [num_slots, heads, dim]. Raises NotOffered if it is larger than MAX_STORE_BYTES."""
    if 4 * num_slots * heads * dim > MAX_STORE_BYTES:
        raise NotOffered(
            f"{num_slots} slots in at most {MAX_STORE_BYTES >> 20} MiB, where its limits lead to {heads} heads of {dim}"
        )
    return np.zeros((num_slots, heads, dim), np.float32)


def assert_scatter_and_gather(
    subject: Subject, num_slots: int, slots: NDArray, heads: int, dim: int, integer: Any = np.int64
) -> None:
    """Scatters tokens to slots and gathers them in another order; other slots must not change.

    heads, dim: the wanted sizes. integer: the type of slots.
    """
    heads, dim = subject.size("num_kv_heads", heads), subject.size("head_dim", dim)
    kernels = subject.new("kernels")
    store: Any = subject.to_own_array(empty_store(num_slots, heads, dim))
    for part in np.array_split(slots, 3):
        moved = tokens_of_slots(subject, part, heads, dim)
        store = OwnArray(kernels.as_is("scatter", store, part.astype(integer), moved))
    back = subject.rng.permutation(slots)
    got = subject.numpy(kernels.as_is("gather", store, back.astype(integer)))
    assert_same(got, tokens_of_slots(subject, back, heads, dim), f"tokens gathered from {len(back)} of {num_slots} slots")
    others = np.setdiff1d(np.concatenate([slots + 1, slots - 1]) % num_slots, slots)[:1000]
    got = subject.numpy(kernels.as_is("gather", store, others))
    assert_same(got, np.zeros((len(others), heads, dim), np.float32), "other slots")


@check("LAW-18", "kernels")
def scatter_and_gather_move_whole_tokens_at_production_sizes(subject: Subject) -> None:
    near = [power + by for power in (256, 1024, 4096, 32_768, 65_536) for by in (-1, 0, 1)]
    slots = np.unique([*near, 0, 69_999, *subject.rng.choice(70_000, 2000, replace=False)])
    size = subject.size("block_size", 1)  # the store has whole blocks
    many, few = (-(-count // size) * size for count in (70_000, 600))
    assert_scatter_and_gather(subject, many, subject.rng.permutation(slots), 1, 16)
    for integer in INTEGERS[2:4]:  # slots whose offsets are beyond their type
        small = slots[slots <= np.iinfo(integer).max][-300:]
        assert_scatter_and_gather(subject, many, subject.rng.permutation(small), 1, 16, integer)
    for dim in dict.fromkeys(subject.size("head_dim", each) for each in HEAD_DIMS):
        assert_scatter_and_gather(subject, few, subject.rng.permutation(600)[:300], 3, dim)


@check("LAW-18", "kernels")
def update_starts_at_any_position(subject: Subject) -> None:
    kernels = subject.new("kernels")
    batch, heads = subject.size("batch_size", 1), subject.size("num_kv_heads", 2)
    for dim in dict.fromkeys(subject.size("head_dim", each) for each in (64, 128)):
        buffer = np.zeros((batch, heads, 1030, dim), np.float32)
        for position, count in ((0, 127), (127, 2), (129, 383), (512, 1), (513, 511), (1024, 6)):
            rows = tokens_of_slots(subject, np.arange(position, position + batch * count), heads, dim)
            new = rows.reshape(batch, count, heads, dim).transpose(0, 2, 1, 3)
            got = subject.numpy(kernels.as_is("update", buffer.copy(), new, position))
            buffer[:, :, position : position + count] = new
            assert_same(got, buffer, f"a buffer after update with {count} tokens at {position}")


@check("LAW-18", "kernels")
def copy_distinguishes_blocks_past_16_bits(subject: Subject) -> None:
    heads, dim = subject.size("num_kv_heads", 1), subject.size("head_dim", 4)
    kernels, size, blocks = subject.new("kernels"), subject.size("block_size", 2), 66_000
    sources = np.array([0, 255, 256, 32_767, 32_768, 65_535, 65_536, 65_999])
    targets = np.array([65_537, 1, 65_998, 300, 40_000, 2, 65_700, 3])
    store = empty_store(blocks * size, heads, dim)
    for source in sources:
        slots = np.arange(source * size, (source + 1) * size)
        store[source * size : (source + 1) * size] = tokens_of_slots(subject, slots, heads, dim)
    want = store.copy()
    want.reshape(blocks, size, heads, dim)[targets] = store.reshape(blocks, size, heads, dim)[sources]
    got = subject.numpy(kernels.as_is("copy", subject.to_own_array(store), sources, targets, size))
    assert_same(got, want, f"a store of {blocks} blocks after a copy of {len(sources)}")
