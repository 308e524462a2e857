"""`kvref report`: results of several runs as a page."""

import argparse
from pathlib import Path

from rich.console import Console
from rich.text import Text

from kvref_conformance.outcome import CannotRun
from kvref_conformance.report.html import is_report, write_site
from kvref_conformance.report.json_file import read_json
from kvref_conformance.report.runs import Run

LONGEST = 80  # characters of a label


def report(options: argparse.Namespace) -> int:
    folder = Path(options.output)
    if folder.exists() and not folder.is_dir():
        raise CannotRun(f"--output: {folder} is a file")
    if folder.is_dir() and any(folder.iterdir()) and not is_report(folder):
        raise CannotRun(
            f"--output: {folder} has other things in it, and is no report of kvref's: give an empty folder or a new one"
        )
    runs: dict[str, Run] = {}
    for said in options.results:
        label, path = _labelled(said)
        run = Run(path, read_json(path), label)
        if run.name in runs:
            raise CannotRun(
                f"two results of {run.name}: {runs[run.name].path} and {path}; "
                f"name them: kvref report before={runs[run.name].path} after={path}"
            )
        runs[run.name] = run
    page = write_site(folder, list(runs.values()))
    counted = f"{len(runs)} implementation{'' if len(runs) == 1 else 's'}"
    Console(highlight=False).print(Text(f"{page}: {counted}"), soft_wrap=True)
    return 0


def _labelled(said: str) -> tuple[str, Path]:
    """The label, which may be empty, and the file of FILE or NAME=FILE. Raises CannotRun."""
    label, equals, file = said.partition("=")
    if not equals or Path(said).exists():  # a file may have such a name
        return "", Path(said)
    if not label or not file or not label.isprintable() or len(label) > LONGEST:
        raise CannotRun(f"{said}: expected NAME=FILE, a name of at most {LONGEST} characters on one line, and a file")
    return label, Path(file)
