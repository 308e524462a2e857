"""`release` does not wait until a write in progress ends.

The values are written to memory that already belongs to the next owner.
"""

import random
import time
from contextlib import nullcontext
from typing import Any

import kvref
from kvref_zoo.right import Right


class Copying(kvref.ReferenceBackend):
    def update(self, buffer: Any, new: Any, position: int) -> Any:
        time.sleep(random.uniform(0, 1e-3))  # a copy to another device takes some time
        return super().update(buffer, new, position)


class Pool(kvref.BufferPool):
    def acquire(self, num_bytes: int) -> kvref.Buffer:
        buffer: Any = super().acquire(num_bytes)
        buffer._lock = nullcontext()
        return buffer  # type: ignore[no-any-return]


class Implementation(Right):
    clause = "BUF-08"
    bug = "sgl-project/sglang#24226"

    def buffers(self, max_buffers: int) -> Pool:
        return Pool(max_buffers, Copying())
