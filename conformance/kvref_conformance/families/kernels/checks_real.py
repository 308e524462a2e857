"""Checks of LAW-18: kernels at production sizes."""

from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.content import KEYS, content
from kvref_conformance.checking.expect import same
from kvref_conformance.checking.real import DIMS
from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.calls import Own
from kvref_conformance.conversation.subject import Subject


def tokens(slots: NDArray, heads: int, dim: int) -> NDArray:
    """Returns float32 [n, heads, dim]: the token that belongs in each slot."""
    return content(0, 0, slots, heads, dim, KEYS)


def moved(subject: Subject, num_slots: int, slots: NDArray, heads: int, dim: int) -> None:
    """Scatters tokens to slots and gathers them in another order; other slots must not change."""
    kernels = subject.new("kernels")
    store: Any = subject.own(np.zeros((num_slots, heads, dim), np.float32))
    for part in np.array_split(slots, 3):
        store = Own(kernels.as_is("scatter", store, part, tokens(part, heads, dim)))
    back = subject.rng.permutation(slots)
    got = subject.numpy(kernels.as_is("gather", store, back))
    same(got, tokens(back, heads, dim), f"tokens gathered from {len(back)} of {num_slots} slots")
    others = np.setdiff1d(np.concatenate([slots + 1, slots - 1]) % num_slots, slots)[:1000]
    same(subject.numpy(kernels.as_is("gather", store, others)), np.zeros((len(others), heads, dim), np.float32), "other slots")


@check("LAW-18", "kernels")
def slots_are_told_apart_past_16_bits(subject: Subject) -> None:
    near = [power + by for power in (256, 1024, 4096, 32_768, 65_536) for by in (-1, 0, 1)]
    slots = np.unique([*near, 0, 69_999, *subject.rng.choice(70_000, 2000, replace=False)])
    moved(subject, 70_000, subject.rng.permutation(slots), 1, 16)


@check("LAW-18", "kernels")
def rows_of_any_width_are_moved_to_their_end(subject: Subject) -> None:
    for dim in DIMS:
        moved(subject, 600, subject.rng.permutation(600)[:300], 3, dim)


@check("LAW-18", "kernels")
def an_update_may_begin_anywhere(subject: Subject) -> None:
    kernels = subject.new("kernels")
    for dim in (64, 128):
        buffer = np.zeros((1, 2, 1030, dim), np.float32)
        for position, count in ((0, 127), (127, 2), (129, 383), (512, 1), (513, 511), (1024, 6)):
            new = tokens(np.arange(position, position + count), 2, dim).transpose(1, 0, 2)[None]
            got = subject.numpy(kernels.as_is("update", buffer.copy(), new, position))
            buffer[:, :, position : position + count] = new
            same(got, buffer, f"a buffer after update with {count} tokens at {position}")


@check("LAW-18", "kernels")
def blocks_are_copied_past_16_bits(subject: Subject) -> None:
    kernels, size, blocks = subject.new("kernels"), 2, 66_000
    sources = np.array([0, 255, 256, 32_767, 32_768, 65_535, 65_536, 65_999])
    targets = np.array([65_537, 1, 65_998, 300, 40_000, 2, 65_700, 3])
    store = np.zeros((blocks * size, 1, 4), np.float32)
    for source in sources:
        store[source * size : (source + 1) * size] = tokens(np.arange(source * size, (source + 1) * size), 1, 4)
    want = store.copy()
    want.reshape(blocks, size, 4)[targets] = store.reshape(blocks, size, 4)[sources]
    got = subject.numpy(kernels.as_is("copy", subject.own(store), sources, targets, size))
    same(got, want, f"a store of {blocks} blocks after a copy of {len(sources)}")
