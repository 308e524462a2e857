"""The `kvref` command in a folder of its own, which has a module of implementations."""

import subprocess
import sys

import pytest

BROKEN = """
from kvref_conformance.implementations.backends import OnBackend
import kvref, sys
import numpy as np

class Pool(kvref.BlockPool):
    def free(self, block):
        if 0 < self._references[block]:
            return super().free(block)
        self._free = np.append(self._free[: self._num_free], block)
        self._num_free += 1

class FreesTwice(OnBackend):
    name = "frees[bold]twice"
    def __init__(self):
        self.backend = kvref.reference
    def blocks(self, num_blocks):
        print("noise on stdout")
        print("noise on stderr", file=sys.stderr)
        return Pool(num_blocks)

class Debugged(FreesTwice):
    name = "debugged"
    def blocks(self, num_blocks):
        breakpoint()
        return Pool(num_blocks)

class OnlyKernels:
    name, version, language, level, formats = "only-kernels", "1", "python", "exact", ()
    def asarray(self, values): return values
    def to_numpy(self, array): return array
    def kernels(self): return kvref.backend("numpy")

def explodes():
    raise RuntimeError("no device\\nand a second line")

class Nothing:
    name, version, language, level, formats = "nothing", "1", "python", "exact", ()
    def asarray(self, values): return values
    def to_numpy(self, array): return array

class Misspelt(Nothing):
    def page(self, **config): return None

class Sloppy(Nothing):
    level = "roughly"

class Odd(Nothing):
    formats = ("int3",)

class Nameless: pass
"""


@pytest.fixture
def kvref(tmp_path):
    """Run the command in a folder that has a module `mine` with implementations."""
    (tmp_path / "mine.py").write_text(BROKEN)
    (tmp_path / "syntax.py").write_text("def broken(:\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")  # the user's own tests, not ours

    def run(*arguments, typed=None):
        command = [sys.executable, "-m", "kvref_conformance.cli", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120, input=typed)

    return run
