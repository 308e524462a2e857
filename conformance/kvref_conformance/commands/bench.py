"""`kvref bench`: compares the time of kernels and caches with a memcpy and with other libraries."""

import argparse
import itertools
import json
import os
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

import kvref
from kvref.errors import BackendNotFound
from kvref_bench import caches, kernels, prefixes, report, windows
from kvref_bench.comparison import ComparisonResult, absent, hold, machine
from kvref_conformance.implementations import existing_folder
from kvref_conformance.outcome import CannotRun

BY_DEFAULT = ("numpy", "torch", "torch-compiled", "cupy")


def bench(options: argparse.Namespace) -> int:
    if options.size < 1:
        raise CannotRun(f"--size: expected at least 1 MB, got {options.size}")
    for option in ("json", "plot"):
        existing_folder(option, getattr(options, option))
    backends = _backends(options.backends)
    _on_one_core()
    console, about = Console(highlight=False), machine()
    console.print(Text(f"{about['processor']}, {about['cores']} cores, one of them used; Python {about['python']}, "
                       + ", ".join(f"{name} {version}" for name, version in about["packages"].items())))  # fmt: skip
    if missing := absent():
        console.print(Text(f"left out, because they are not installed: {', '.join(missing)}"))
    console.print(Text("x memcpy: time / memcpy of the bytes that have to move; x data: time / memcpy of the float32 data"))
    outcomes: list[ComparisonResult] = []

    def wanted(title: str) -> bool:
        return fnmatchcase(title, options.only)

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    progress = Console(stderr=True)
    with Progress(*columns, console=progress, transient=True, disable=not progress.is_terminal) as live:
        task = live.add_task("preparing")
        parts = (
            kernels.contests(backends, options.size, wanted),
            caches.contests(backends, wanted),
            windows.contests(backends, wanted),
            prefixes.contests(backends, wanted),  # last: after the stand-in for SGLang's Triton, torch cannot compile any more
        )
        for contest in itertools.chain(*parts):
            live.update(task, description=f"{contest.title} ({contest.shape})")
            outcomes.append(hold(contest))
            console.print(report.table(outcomes[-1]))
    if not outcomes:
        raise CannotRun(f"--only {options.only}: no contest matches")
    if options.json:
        Path(options.json).write_text(json.dumps(report.document(about, outcomes), indent=1) + "\n", encoding="utf-8")
    if options.plot:
        Path(options.plot).write_text(report.plot(about, outcomes), encoding="utf-8")
    return 0


def _backends(names: list[str]) -> list[kvref.Backend]:
    """The backends named on the command line; if there are none, all of kvref's that work here. Raises CannotRun."""
    found = []
    for name in names or BY_DEFAULT:
        try:
            found.append(kvref.backend(name))
        except BackendNotFound as error:
            if names:
                raise CannotRun(str(error)) from error
    return found


def _on_one_core() -> None:
    """Use one core: memcpy uses one, and ratios must not depend on how many a library uses."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
