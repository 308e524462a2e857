"""Runs the `kvref` command in a process and a folder of its own that contains a module of implementations.

A new interpreter needs half a second to import the command's dependencies. A fork server imports them once per test worker, and
each command runs in a fork of that server: a process with its own environment, folder and streams.
"""

import atexit
import multiprocessing
import os
import subprocess
import sys
import tempfile
from functools import cache
from multiprocessing import forkserver
from pathlib import Path

import pytest

TIMEOUT = 300  # seconds per command, also on a busy machine

BROKEN = """
from kvref_conformance.implementations.backends import OnBackend
import kvref, sys
import numpy as np

class Pool(kvref.BlockPool):
    def free(self, block):
        if 0 <= block < len(self._references) and self._references[block]:
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

class Instance(Nothing):
    paged = kvref.BlockPool(5)

class FreesByAnotherName:
    def __init__(self, num_blocks):
        self.pool = kvref.BlockPool(num_blocks)
    def allocate(self):
        return self.pool.allocate()
    def freee(self, block):
        self.pool.free(block)

class MisspeltOperation(Nothing):
    blocks = FreesByAnotherName

class Sloppy(Nothing):
    level = "roughly"

class Odd(Nothing):
    formats = ("int3",)

class NoTuple(Nothing):
    formats = ("float32")

class Nameless: pass
"""


def run_kvref(*arguments, folder, environment=None, typed=""):
    """Run `kvref ARGUMENTS` in a folder; the result is that of `subprocess.run`."""
    with tempfile.TemporaryDirectory() as streams:
        files = [Path(streams, name) for name in ("stdin", "stdout", "stderr")]
        files[0].write_text(typed)
        where = str(folder), dict(os.environ if environment is None else environment), files
        process = fork_server().Process(target=_run, args=(arguments, *where))
        process.start()
        process.join(TIMEOUT)
        if process.is_alive():
            process.kill()
            raise subprocess.TimeoutExpired(arguments, TIMEOUT)
        return subprocess.CompletedProcess(arguments, process.exitcode, files[1].read_text(), files[2].read_text())


@cache
def fork_server():
    """Return the context of the fork server, which starts with this folder on its path.

    Its processes do not inherit the objects of the tests, as a fork of the tests would.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fork_server_imports", "transfer_processes"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        forkserver.ensure_running()
    return context


def _run(arguments, folder, environment, files):
    import fork_server_imports  # only in the child: the tests themselves need none of it

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, file in enumerate(files):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115 - open until the process ends
    sys.path[:] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *fork_server_imports.PATH]
    sys.argv = ["kvref", *arguments]
    try:
        sys.exit(fork_server_imports.cli.main(arguments))
    finally:
        atexit._run_exitfuncs()  # multiprocessing does not run them in a child


@pytest.fixture
def kvref(tmp_path):
    """Run the command in a folder that contains a module `mine` with implementations."""
    (tmp_path / "mine.py").write_text(BROKEN)
    (tmp_path / "syntax.py").write_text("def broken(:\n")
    (tmp_path / "refuses.py").write_text("import os\nraise ValueError('no device')\n")
    # settings of the user's own tests, which must not affect the command
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")

    def run(*arguments, typed=""):
        return run_kvref(*arguments, folder=tmp_path, typed=typed)

    return run
