"""Implementations that misbehave in every way that the judge has to survive: `kvref check misbehaving:Hangs` and so on."""

import atexit
import contextlib
import ctypes
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np

import kvref
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementations.backends import OnBackend


class Well(OnBackend):
    """Only block pools, or only paged caches; a subclass replaces one method."""

    def __init__(self):
        super().__init__(kvref.reference)
        self.name = type(self).__name__.lower()
        others = "elements", "rows", "kernels", "attention", "contiguous", "quantized", "tiered", "buffers", "pooled", "recurrent"
        for family in others:
            setattr(self, family, None)

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if found is None:
            raise AttributeError(name)
        return found


def pool_that(freeing):
    """An implementation whose pools call `freeing` when a block is freed for the second time."""

    class Pool(kvref.BlockPool):
        freed = 0

        def free(self, block):
            super().free(block)
            self.freed += 1
            if self.freed == 2:
                return freeing(self)
            return None

    class Misbehaving(Well):
        def __init__(self):
            super().__init__()
            self.name = freeing.__name__.replace("_", "-")
            self.paged = None

        def blocks(self, num_blocks):
            return Pool(num_blocks)

    return Misbehaving


def hang_in_python(pool):
    while True:
        time.sleep(0.01)


def hang_and_swallow(pool):
    with contextlib.suppress(BaseException):
        time.sleep(60)
    time.sleep(60)


def hang_in_c(pool):
    sum(itertools.repeat(0))  # keeps the interpreter busy: no Python signal handler runs


def be_killed(pool):
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(pool):
    os._exit(7)


def leave_as_if_all_were_well(pool):
    os._exit(0)


def leave_a_child_behind(pool):
    subprocess.Popen(["sleep", "1000"])
    os._exit(3)


def leave_to_a_child(pool):
    if os.fork():
        os._exit(0)  # the child process keeps the pipe to the judge open, so the judge does not see its end
    time.sleep(60)


def exit_politely(pool):
    sys.exit(3)


def write_everywhere(pool):
    for file in range(3, 64):  # two of these are the judge's own
        with contextlib.suppress(OSError):
            os.write(file, b"garbage" * 10)


def write_a_little_and_hang(pool):
    for file in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(file, b"kv")
    ctypes.PyDLL(None).sleep(1000)


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("not even this")


def raise_something_odd(pool):
    raise Unprintable


def print_a_lot(pool):
    print("noise " * 1000)
    print("more noise", file=sys.stderr)
    os.write(1, b"noise past Python\n")


def allocate_without_end(pool):
    kept = []
    while True:
        kept.append(np.zeros(2**27))


HangsInPython = pool_that(hang_in_python)
HangsAndSwallows = pool_that(hang_and_swallow)
HangsInC = pool_that(hang_in_c)
IsKilled = pool_that(be_killed)
Leaves = pool_that(leave)
LeavesAsIfAllWereWell = pool_that(leave_as_if_all_were_well)
LeavesAChildBehind = pool_that(leave_a_child_behind)
LeavesToAChild = pool_that(leave_to_a_child)
WritesEverywhere = pool_that(write_everywhere)
WritesALittleAndHangs = pool_that(write_a_little_and_hang)
ExitsPolitely = pool_that(exit_politely)
RaisesSomethingOdd = pool_that(raise_something_odd)
Prints = pool_that(print_a_lot)
AllocatesWithoutEnd = pool_that(allocate_without_end)


class _Paged(Well):
    def __init__(self):
        super().__init__()
        self.blocks = None

    def paged(self, **config):
        return self.cache(kvref.PagedConfig(**config))


class WrongType(_Paged):
    class cache(kvref.PagedCache):
        def gather(self, sequence, layer):
            return "no arrays"


class WrongNumber(_Paged):
    class cache(kvref.PagedCache):
        def length(self, sequence, layer):
            return str(super().length(sequence, layer))


class WrongShape(_Paged):
    class cache(kvref.PagedCache):
        def gather(self, sequence, layer):
            keys, values = super().gather(sequence, layer)
            return keys[..., None], values


class WrongDtype(_Paged):
    class cache(kvref.PagedCache):
        def gather(self, sequence, layer):
            keys, values = super().gather(sequence, layer)
            return keys.astype(np.float64), values


class IntegersForFloats(_Paged):
    class cache(kvref.PagedCache):
        def gather(self, sequence, layer):
            keys, values = super().gather(sequence, layer)
            return np.trunc(keys).astype(np.int32), values


class ViewThatChanges(_Paged):
    class cache(kvref.PagedCache):
        def gather(self, sequence, layer):
            slots = self.slot_mapping(sequence, layer, 0, self.length(sequence, layer))
            if slots and slots == list(range(slots[0], slots[0] + len(slots))):
                return tuple(part._stored.codes[slots[0] : slots[-1] + 1] for part in (self._store.keys, self._store.values))
            return super().gather(sequence, layer)


class ChangesItsInputs(_Paged):
    class cache(kvref.PagedCache):
        def write(self, sequence, layer, start, keys, values):
            super().write(sequence, layer, start, keys, values)
            if keys.size:
                keys[...] = 0


class AsarrayRaises(_Paged):
    cache = kvref.PagedCache

    def asarray(self, values):
        raise RuntimeError("no memory on the device")


class ToNumpyRaises(_Paged):
    cache = kvref.PagedCache

    def to_numpy(self, array):
        raise RuntimeError("the device is gone")


class ToNumpyHangs(_Paged):
    cache = kvref.PagedCache

    def to_numpy(self, array):
        time.sleep(60)


class AsarrayDeclines(_Paged):
    """Declines large arrays."""

    cache = kvref.PagedCache

    def asarray(self, values):
        if values.size > 2:
            raise NotOffered("arrays of more than two numbers")
        return super().asarray(values)


class ToNumpyDeclines(_Paged):
    cache = kvref.PagedCache

    def to_numpy(self, array):
        raise NotOffered("arrays that NumPy has")


class FactoryRaises(_Paged):
    def paged(self, **config):
        raise RuntimeError("no device")


class FactoryTakesNothing(_Paged):
    def paged(self):
        """Has another signature."""


class FactoryReturnsNone(_Paged):
    def paged(self, **config):
        kvref.PagedCache(kvref.PagedConfig(**config))


class FactoryReturnsOther(_Paged):
    def paged(self, **config):
        return 7


def dies_when_made():
    os.kill(os.getpid(), signal.SIGKILL)


def leaves_when_made():
    os._exit(0)


def writes_when_made():
    write_everywhere(None)
    return Prints()


class TidiesUp(Well):
    """Has a temporary folder, which is also its version, and removes it at exit; with SLOW set, the removal hangs."""

    def __init__(self):
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.version = self._folder.name
        atexit.register(self.tidy)

    def tidy(self):
        time.sleep(1000 if "SLOW" in os.environ else 0.2)
        self._folder.cleanup()
