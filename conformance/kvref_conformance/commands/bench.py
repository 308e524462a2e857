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
from kvref_bench.comparison import ComparisonResult, describe_machine, missing_packages, run_comparison
from kvref_conformance.exceptions import CannotRun
from kvref_conformance.implementations import require_folder

DEFAULT_BACKENDS = ("numpy", "torch", "torch-compiled", "cupy")


def bench(options: argparse.Namespace) -> int:
    if options.size < 1:
        raise CannotRun(f"--size: expected at least 1 MB, got {options.size}")
    for option in ("json", "plot"):
        require_folder(option, getattr(options, option))
    backends = _backends(options.backends)
    _use_one_core()
    console, about = Console(highlight=False), describe_machine()
    console.print(Text(f"{about['processor']}, {about['cores']} cores, one of them used; Python {about['python']}, "
                       + ", ".join(f"{name} {version}" for name, version in about["packages"].items())))  # fmt: skip
    if missing := missing_packages():
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
            kernels.kernel_contests(backends, options.size, wanted),
            caches.cache_contests(backends, wanted),
            windows.window_contests(backends, wanted),
            prefixes.prefix_contests(
                backends, wanted
            ),  # last: after the stand-in for SGLang's Triton, torch cannot compile any more
        )
        for comparison in itertools.chain(*parts):
            live.update(task, description=f"{comparison.title} ({comparison.shape})")
            outcomes.append(run_comparison(comparison))
            console.print(report.results_table(outcomes[-1]))
    if not outcomes:
        raise CannotRun(f"--only {options.only}: no contest matches")
    if options.json:
        Path(options.json).write_text(json.dumps(report.results_document(about, outcomes), indent=1) + "\n", encoding="utf-8")
    if options.plot:
        Path(options.plot).write_text(report.results_plot(about, outcomes), encoding="utf-8")
    return 0


def _backends(names: list[str]) -> list[kvref.Backend]:
    """The backends named on the command line; if there are none, all of kvref's that work here. Raises CannotRun."""
    found = []
    for name in names or DEFAULT_BACKENDS:
        try:
            found.append(kvref.backend(name))
        except BackendNotFound as error:
            if names:
                raise CannotRun(str(error)) from error
    return found


def _use_one_core() -> None:
    """Use one core: memcpy uses one, and ratios must not depend on how many a library uses."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
