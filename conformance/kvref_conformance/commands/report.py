"""`kvref report`: results of several runs as a page."""

import argparse
from pathlib import Path

from rich.console import Console
from rich.text import Text

from kvref_conformance.outcome import CannotRun
from kvref_conformance.report.html import Run, write_site
from kvref_conformance.report.json_file import read_json


def report(options: argparse.Namespace) -> int:
    folder = Path(options.output)
    if folder.exists() and not folder.is_dir():
        raise CannotRun(f"--output: {folder} is a file")
    runs: dict[str, Run] = {}
    for path in map(Path, options.results):
        run = Run(path, read_json(path))
        if run.name in runs:
            raise CannotRun(f"two results of {run.name}: {runs[run.name].path} and {path}")
        runs[run.name] = run
    page = write_site(folder, list(runs.values()))
    counted = f"{len(runs)} implementation{'' if len(runs) == 1 else 's'}"
    Console(highlight=False).print(Text(f"{page}: {counted}"), soft_wrap=True)
    return 0
