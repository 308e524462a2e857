"""Bugs in the buffer pool."""

import random
import time

from bugs.plant import bug, in_source
from kvref.backend import ReferenceBackend
from kvref.buffers import BufferPool


@bug("BUF-01")
def a_full_class_goes_up_one(patch):
    in_source(patch, "kvref.buffers.size_class", "num_bytes <= size", "num_bytes < size")


@bug("BUF-02", "BUF-08")
def live_buffers_share_memory(patch):
    memory = {}
    patch.setattr(
        BufferPool, "_allocate", lambda self, size: memory.setdefault(size, self.backend.zeros((1, 1, size // 4, 1), "float32"))
    )


@bug("BUF-03", "BUF-07")
def prewarming_counts_as_hits(patch):
    in_source(patch, "kvref.buffers.BufferPool.prewarm", "self._free[size].append(", "self._hits += 1; self._free[size].append(")


@bug("BUF-04")
def one_too_many_is_kept(patch):
    in_source(patch, "kvref.buffers.BufferPool.take_back", "< self.max_buffers", "<= self.max_buffers")


@bug("BUF-05")
def a_second_release_counts_again(patch):
    in_source(patch, "kvref.buffers.Buffer.release", "memory, self._memory = self._memory, None", "memory = self._memory")


@bug("BUF-06")
def prewarming_ignores_the_limit(patch):
    in_source(patch, "kvref.buffers.BufferPool.prewarm", "min(count, self.max_buffers - len(self._free[size]))", "count")


@bug("LAW-05")
def a_buffer_shows_its_last_owners_values(patch):
    in_source(patch, "kvref.buffers.Buffer.__init__", "self.length = 0", "self.length = int((memory != 0).sum())")


@bug("BUF-08")
def a_release_does_not_wait(patch):
    update = ReferenceBackend.update

    def in_its_own_time(self, *args):
        time.sleep(random.uniform(0, 1e-3))  # so that the race occurs on a busy machine too
        return update(self, *args)

    patch.setattr(ReferenceBackend, "update", in_its_own_time)
    in_source(patch, "kvref.buffers.Buffer.__init__", "Lock()", "__import__('contextlib').nullcontext()")


@bug("BUF-02", "BUF-08", "BUF-09")
def what_the_kernel_returned_is_dropped(patch):
    update = ReferenceBackend.update
    patch.setattr(ReferenceBackend, "update", lambda self, buffer, *new: update(self, buffer.copy(), *new))
    in_source(patch, "kvref.buffers.Buffer.extend", "self._memory = self._pool", "self._pool")


@bug("BUF-09")
def the_last_value_may_lie_past_the_end(patch):
    in_source(patch, "kvref.buffers.Buffer.extend", "end > self.capacity", "end > self.capacity + 1")


@bug("BUF-09")
def clear_leaves_one_value(patch):
    in_source(patch, "kvref.buffers.Buffer.clear", "self.length = 0", "self.length = min(1, self.length)")
