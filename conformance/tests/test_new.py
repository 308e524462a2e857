"""The scaffold, in a copy of the repository: a new family works at once, a new clause fails until it is written."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvref_conformance
from kvref_conformance.new.__main__ import main

ROOT = Path(kvref_conformance.__file__).parents[2]
COPIED = ("kvref", "backends", "conformance/kvref_conformance", "conformance/kvref_canary", "conformance/tests", "pyproject.toml",
          "conformance/adapters/pyproject.toml")  # fmt: skip


@pytest.fixture
def checkout(tmp_path):
    for name in COPIED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    return tmp_path


def run(checkout, *command, expect=0):
    """Runs a Python program in the copy, and returns what it printed."""
    path = os.pathsep.join(str(checkout / part) for part in ("", "backends", "conformance"))
    done = subprocess.run(
        [sys.executable, *command],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


def new(checkout, *args, expect=0):
    return run(checkout, "-m", "kvref_conformance.new", *args, expect=expect)


def check(checkout, *args, expect=0):
    main = "import sys; from kvref_conformance.cli import main; sys.exit(main())"
    return run(checkout, "-c", main, "check", "reference", *args, expect=expect)


@pytest.mark.extended
def test_a_new_family_is_complete_and_a_new_clause_is_not(checkout):
    assert "wrote   kvref/ring.py" in new(checkout, "family", "ring", "Ring cache")
    assert "22 of 22 judged, all passed" in check(checkout, "--family", "ring")
    broken = run(
        checkout,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "kvref/spec/ring.md",
        "conformance/tests/test_planted_bugs.py",
        "-k",
        "ring or RING",
    )
    assert "passed" in broken
    assert "failed" not in broken
    new(checkout, "clause", "RING-04", "Old tokens are evicted")
    assert "NotImplementedError" in check(checkout, "--family", "ring", "--clause", "RING-04", expect=1)


def test_a_new_adapter_has_an_entry_point_and_lists_the_operations(checkout):
    new(checkout, "adapter", "my_cache", "--family", "paged")
    entries = (checkout / "conformance/adapters/pyproject.toml").read_text()
    assert 'my-cache = "kvref_adapters.my_cache.adapter:MyCache"' in entries
    adapter = (checkout / "conformance/adapters/kvref_adapters/my_cache/adapter.py").read_text()
    compile(adapter, "adapter.py", "exec")
    assert "create, drop" in adapter


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("clause", "PAGED-06", "Slots"), "PAGED-06 exists"),
        (("clause", "PAGED6", "Slots"), "expected an id such as SHARE-10, got 'PAGED6'"),
        (("clause", "PAGD-06", "Slots"), "expected an id that begins with one of ATTN"),
        (("clause", "PAGED-99", "Slots", "--family", "page"), "--family: expected one of"),
        (("family", "paged", "Paged cache"), "paged exists"),
        (("family", "Ring", "Ring cache"), "expected lower-case letters"),
        (("adapter", "mlx-lm"), "expected a Python module name"),
        (("adapter", "mlx_lm"), "mlx-lm exists"),
        (("adapter", "flax_linen"), "an implementation named flax-linen exists"),
        (("family", "canary", "Canary"), "canary exists"),
        (("family", "class", "Class"), "expected lower-case letters"),
        (("clause", "SHARE-10", ""), "expected a sentence"),
        (("clause", "SHARE-10", "2 forks share"), "expected a sentence"),
        (("clause", "SHARE-10", "Fork reads as its parent"), "paged has a check of this name"),
    ],
)
def test_unusable_names_are_refused(args, message, capsys):
    assert main(args) == 2
    assert message in capsys.readouterr().err
