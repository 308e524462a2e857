"""The pool updates its statistics without a lock: releases of two threads at the same time are counted as one."""

import time
from contextlib import nullcontext
from typing import Any

import kvref
from kvref_zoo.right import Right


class Pool(kvref.BufferPool):
    def __init__(self, max_buffers: int) -> None:
        super().__init__(max_buffers)
        self.lock: Any = nullcontext()

    def take_back(self, memory: Any, size: int) -> None:
        returns = self._returns
        time.sleep(0)  # let another thread run, as can happen at any time
        super().take_back(memory, size)
        self._returns = returns + 1


class Implementation(Right):
    clause = "BUF-08"
    bug = "cupy/cupy#382"

    def buffers(self, max_buffers: int) -> Pool:
        return Pool(max_buffers)
