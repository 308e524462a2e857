"""A release does not wait for what is being written: the values arrive in memory that is the next owner's by then."""

from contextlib import nullcontext
from typing import Any

import kvref
from kvref_zoo.right import Right


class Pool(kvref.BufferPool):
    def acquire(self, num_bytes: int) -> kvref.Buffer:
        buffer: Any = super().acquire(num_bytes)
        buffer._lock = nullcontext()
        return buffer  # type: ignore[no-any-return]


class Implementation(Right):
    clause = "BUF-08"
    bug = "sgl-project/sglang#24226"

    def buffers(self, max_buffers: int) -> Pool:
        return Pool(max_buffers)
