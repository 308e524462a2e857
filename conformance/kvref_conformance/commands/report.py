"""`kvref report`: an HTML report of results, changes since older ones, stale ones, annotations, and a failure as a script."""

import argparse
from collections.abc import Collection, Iterable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from kvref_conformance.exceptions import CannotRun, NotOffered, printable, require_file
from kvref_conformance.implementations import is_program
from kvref_conformance.oracle.model_runner import UnknownObject
from kvref_conformance.report.annotations import annotations
from kvref_conformance.report.html import is_report, write_site
from kvref_conformance.report.json_file import read_json
from kvref_conformance.report.repro_script import make_script
from kvref_conformance.report.results_model import ResultFile, list_changes, list_still_failing
from kvref_conformance.report.staleness import stale_clauses
from kvref_conformance.runner.options import Effort, RunOptions
from kvref_conformance.runner.subprocess_runner import make_runner
from kvref_conformance.traces.format import read_trace

MAX_LABEL_LENGTH = 80  # maximum length of a label


def make_report(options: argparse.Namespace) -> int:
    if options.script:
        if other := next((name for name in ("output", "since", "annotations", "stale") if getattr(options, name)), None):
            raise CannotRun(f"--script: expected no --{other}")
        require_file("--script", options.script, "kvref check writes the traces of failures to .kvref/failures")
        return _print_script(Path(options.script), options.results)
    if not (options.output or options.since or options.annotations or options.stale):
        ways = (
            "--output DIR for a report, --since OLD for a list of changes, --stale, --annotations, or --script TRACE for a script"
        )
        raise CannotRun(f"expected {ways}")
    if not options.results:
        raise CannotRun("expected RESULTS.json, one or more files that kvref check --json wrote")
    if options.output:
        _require_free_folder(Path(options.output))
    runs = _read_results(options.results)
    if options.since:
        require_file("--since", options.since, f"kvref check NAME --json {options.since} writes it")
        _print_changes(_read_results(_result_files(Path(options.since))), runs)
    stale = options.stale and _print_stale(runs.values())
    if options.annotations:
        print("".join(f"{line}\n" for run in runs.values() for line in annotations(run)), end="")
    if options.output:
        page = write_site(Path(options.output), list(runs.values()))
        counted = f"{len(runs)} implementation{'' if len(runs) == 1 else 's'}"
        Console(highlight=False).print(Text(f"{page}: {counted}"), soft_wrap=True)
    return int(stale)


def _require_free_folder(folder: Path) -> None:
    """Raises CannotRun if the folder contains anything other than an older report."""
    if folder.exists() and not folder.is_dir():
        raise CannotRun(f"--output: expected a folder, got the file {folder}")
    if folder.is_dir() and any(folder.iterdir()) and not is_report(folder):
        raise CannotRun(
            f"--output: {folder} is not empty and is not a kvref report: expected a new or empty folder, or an older report"
        )


def _read_results(results: Iterable[str]) -> dict[str, ResultFile]:
    """Runs by name. Raises CannotRun, ResultsError."""
    runs: dict[str, ResultFile] = {}
    for said in results:
        label, path = _split_label(said)
        require_file("RESULTS.json", str(path), f"kvref check NAME --json {path} writes it")
        run = ResultFile(path, read_json(path), label)
        if run.name in runs:
            raise CannotRun(
                f"two results of {run.name}: {runs[run.name].path} and {path}; "
                f"give each a name: kvref report before={runs[run.name].path} after={path}"
            )
        runs[run.name] = run
    return runs


def _result_files(path: Path) -> list[str]:
    """The file itself, or the JSON files in a folder. Raises CannotRun."""
    found = sorted(str(each) for each in path.glob("*.json")) if path.is_dir() else [str(path)]
    if not found:
        raise CannotRun(f"--since: no JSON file in {path}")
    return found


def _print_changes(before: dict[str, ResultFile], now: dict[str, ResultFile]) -> None:
    """A paragraph per implementation with changes or failures, and one line that counts those without a change."""
    console, same = Console(highlight=False), 0
    for name, run in now.items():
        lines = list_changes(before[name], run) if name in before else [f"new: {run.summary}"]
        same += not lines
        if still := list_still_failing(before[name], run) if name in before else []:
            lines.append(f"still fails: {', '.join(still)}")
        if lines:
            console.print(Text("\n  ".join([name, *lines])), soft_wrap=True)
    console.print(Text(f"{same} of {len(now)} unchanged"))
    if gone := [name for name in before if name not in now]:
        console.print(Text(f"only in the older results: {', '.join(gone)}"), soft_wrap=True)


def _print_stale(runs: Collection[ResultFile]) -> bool:
    """A paragraph per file with stale clauses, and one line that counts those without. Returns whether there are any."""
    console, current = Console(highlight=False), 0
    for run in runs:
        reasons = stale_clauses(run)
        current += not reasons
        if reasons:
            about, date = run.document["implementation"], run.document["environment"].get("date")
            heading = f"{run.path}: {about['name']} {about['version']}{f', judged on {date}' if date else ''}"
            lines = [printable(heading, keep_lines=False), *(f"{id}: {reason}" for id, reason in reasons.items())]
            console.print(Text("\n  ".join(lines)), soft_wrap=True)
    console.print(Text(f"{current} of {len(runs)} up to date"))
    return current < len(runs)


def _print_script(path: Path, names: list[str]) -> int:
    """Runs in this process, because the calls that the adapter makes to the library are recorded."""
    if len(names) > 1:
        raise CannotRun(f"--script: expected one NAME, got {', '.join(names)}")
    trace = read_trace(path)
    name = names[0] if names else trace.header.implementation.get("load", trace.header.implementation["name"])
    if is_program(name):
        raise CannotRun(f"--script: expected an implementation in Python, got {name}: kvref cannot record calls inside a program")
    judge = make_runner(RunOptions(name, Effort(seed=trace.header.seed, slow=True, real=True), isolate=False))
    try:
        print(make_script(trace, judge), end="")
    except NotOffered as missing:
        raise CannotRun(f"{name} does not offer {missing}") from missing
    except UnknownObject as unknown:
        raise CannotRun(f"{path}: no model can predict the reply to {unknown}") from unknown
    finally:
        judge.close()
    return 0


def _split_label(said: str) -> tuple[str, Path]:
    """The label (empty if there is none) and the path in FILE or NAME=FILE. Raises CannotRun."""
    label, equals, file = said.partition("=")
    if not equals or Path(said).exists():  # the name of an existing file may contain "="
        return "", Path(said)
    if not label or not file or not label.isprintable() or len(label) > MAX_LABEL_LENGTH:
        raise CannotRun(f"expected NAME=FILE, where NAME is one line of 1 to {MAX_LABEL_LENGTH} characters, got {said}")
    return label, Path(file)
