"""Checks of KERN-09: copies of blocks of slots."""

from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import raises, same, true
from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.kernels.checks import as_is, dtype_of, filled_store, same_bits, shape


def copied(subject: Subject, store: NDArray, sources: Any, targets: Any, block_size: int) -> NDArray:
    """Returns the store after a copy in the implementation's memory."""
    result = as_is(subject.new("kernels"), "copy", subject.own(store), sources, targets, block_size)
    after: NDArray = subject.implementation.to_numpy(result)
    return after


@check("KERN-09a", "kernels")
def blocks_are_copied_bit_for_bit(subject: Subject) -> None:
    size = subject.size("block_size", 3)
    store = filled_store(subject)[: 4 * size]
    store = np.concatenate([store] * -(-4 * size // len(store)))[: 4 * size]
    for sources, targets in (([0], [2]), ([3, 1], [0, 2]), ([1, 1, 1], [3, 0, 2]), ([2], [2]), ([], [])):
        want = store.copy()
        for source, target in zip(sources, targets, strict=True):
            want[target * size : (target + 1) * size] = store[source * size : (source + 1) * size]
        same_bits(copied(subject, store.copy(), sources, targets, size), want, f"store after copy of {sources} to {targets}")


@check("KERN-09b", "kernels")
def a_block_that_is_source_and_target_passes_on_what_was_there(subject: Subject) -> None:
    size = subject.size("block_size", 3)
    store = np.concatenate([filled_store(subject)] * size)[: 4 * size]
    for sources, targets in (([0, 1, 2], [1, 2, 3]), ([3, 2, 1], [2, 1, 0]), ([0, 1], [1, 0]), ([2, 0, 3, 1], [0, 1, 2, 3])):
        want = store.copy()
        want.reshape(4, size, *shape(subject))[targets] = store.reshape(4, size, *shape(subject))[sources]
        same_bits(copied(subject, store.copy(), sources, targets, size), want, f"store after copy of {sources} to {targets}")


@check("KERN-09c", "kernels")
def a_target_named_twice_holds_one_source_whole(subject: Subject) -> None:
    size, (dtype, _) = subject.size("block_size", 3), dtype_of(subject)
    numbers = np.repeat(np.arange(1, 5), size)[:, None, None]
    store = np.broadcast_to(numbers, (4 * size, *shape(subject))).astype(dtype)
    got = np.asarray(copied(subject, store, [0, 1, 2, 1], [3, 3, 0, 3], size))
    values = set(got[3 * size :].reshape(-1).tolist())
    true(
        len(values) == 1 and values <= {1.0, 2.0},
        "block 3 after copy of [0, 1, 2, 1] to [3, 3, 0, 3]",
        "the value of block 0 or of block 1 in every element",
        values,
    )
    same(
        got[:size], store[2 * size : 3 * size], "block 0 after copy of [0, 1, 2, 1] to [3, 3, 0, 3], compared with block 2 before"
    )


@check("KERN-09d", "kernels")
def a_copy_that_is_wrong_writes_nothing(subject: Subject) -> None:
    size, kernels = subject.size("block_size", 3), subject.new("kernels")
    store = np.concatenate([filled_store(subject)] * size)[: 4 * size - 1]  # the last block lacks a slot
    wrong: list[tuple[Any, Any, str]] = [
        ([0, 4], [1, 2], "SlotOutOfRange"), ([0, 1], [2, 4], "SlotOutOfRange"), ([0, 3], [1, 2], "SlotOutOfRange"),
        ([0, 1], [2, 3], "SlotOutOfRange"), ([0, 1], [2], "ShapeMismatch"), ([0], [1, 2], "ShapeMismatch"),
        (np.array([0.0, 1.0], np.float32), [1, 2], "DtypeMismatch"), ([0, 1], np.array([True, False]), "DtypeMismatch"),
        (np.array([0, 2**32 - 1], np.uint32), [1, 2], "SlotOutOfRange"),
    ]  # fmt: skip
    if subject.limits.switch("kernels", "negative_integers"):
        wrong += [([0, -1], [1, 2], "SlotOutOfRange"), ([0, 1], [2, -1], "SlotOutOfRange")]
    for sources, targets, kind in wrong:
        own = subject.own(store.copy())
        with raises(kind):
            as_is(kernels, "copy", own, sources, targets, size)
        same_bits(subject.implementation.to_numpy(own.array), store, f"the store after a rejected copy of {sources} to {targets}")
