"""`kvref vectors`: writes static test vectors, or compares an implementation with them."""

import argparse
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvref_conformance.clauses import all_clauses
from kvref_conformance.exceptions import CannotRun, require_file
from kvref_conformance.implementations import selected_name
from kvref_conformance.runner.check_runner import shorten_calls
from kvref_conformance.runner.options import Effort, RunOptions
from kvref_conformance.runner.subprocess_runner import make_runner
from kvref_conformance.vectors.check import VectorResult, check_vectors
from kvref_conformance.vectors.generate import MANIFEST, make_vectors


def compare_vectors(options: argparse.Namespace) -> int:
    name, console = selected_name(options), Console(highlight=False)
    if (options.output is None) == (options.check is None):
        raise CannotRun("expected -o DIR to write test vectors, or --check DIR and a NAME to compare an implementation with them")
    if options.output is not None:
        if name is not None:
            raise CannotRun(f"-o: expected no NAME, got {name}: the vectors are always made from the reference")
        return _write_vectors(Path(options.output), console)
    if name is None:
        raise CannotRun("--check: expected also a NAME or --exec COMMAND, the implementation to compare with the vectors")
    require_file("--check", options.check, f"kvref vectors -o {options.check} writes vectors")
    held, judge = list[VectorResult](), make_runner(RunOptions(name, Effort(timeout=options.timeout)))
    try:
        with Console(stderr=True).status("reading vectors") as status:
            for result in check_vectors(Path(options.check), judge):
                held.append(result)
                status.update(f"{len(held)} files compared, the last one is {result.file}")
    finally:
        judge.close()
    failed = [each for each in held if each.verdict == "failed"]
    for each in failed:
        _print_result(console, each, Path(options.check), name)
    console.print(_results_table(held))
    if all(each.verdict == "not offered" for each in held):
        raise CannotRun(f"{name}: nothing to test, it offers no operation of these vectors")
    conclusion = f"{len(failed)} of {len(held)} files do not match" if failed else "every reply matches the vectors"
    console.print(Text(conclusion, style="bold red" if failed else "bold green"))
    return 1 if failed else 0


def _write_vectors(folder: Path, console: Console) -> int:
    if folder.exists() and not folder.is_dir():
        raise CannotRun(f"-o: expected a folder, got the file {folder}")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).is_file():
        raise CannotRun(f"-o: {folder} is not empty and has no {MANIFEST}: expected a new or empty folder, or older vectors")
    with Console(stderr=True).status("making vectors from the reference: this takes some minutes"):
        made = make_vectors()
        made.write(folder)
    size = sum(map(len, made.files.values())) / 1e6
    console.print(f"{folder}: {len(made.traces)} traces and {len(made.formats)} formats, {size:.1f} MB; {MANIFEST} lists them")
    console.print(f"left out: {len(made.left_out)} checks that a file cannot express; {MANIFEST} gives the reason for each")
    return 0


def _print_result(console: Console, each: VectorResult, folder: Path, name: str) -> None:
    assert each.violation
    clause = all_clauses().get(each.violation.clause)
    title = f"{clause.id} · {clause.title}" if clause else each.file
    console.print(Text(f"{title}   ({name})", style="bold red"), soft_wrap=True)
    for call in shorten_calls(each.calls):
        console.print(Text(f"  {call}"), soft_wrap=True)
    what, expected, got = each.violation.what, each.violation.expected, each.violation.got
    console.print(Text(f"    {what}\n    expected {expected}\n    got      {got}"), soft_wrap=True)
    at = f"line {each.line} of " if each.line else ""
    console.print(Text(f"  first mismatch at {at}{folder / each.file}\n"), soft_wrap=True)


def _results_table(held: list[VectorResult]) -> Table:
    counts = Counter((each.group, str(each.verdict)) for each in held)
    table = Table("vectors", box=None, pad_edge=False, header_style="bold")
    verdicts = ("passed", "failed", "not offered")
    for verdict in verdicts:
        table.add_column(verdict, justify="right")
    for group in dict.fromkeys(each.group for each in held):
        table.add_row(group, *(str(counts[group, verdict] or "·") for verdict in verdicts))
    table.add_row("all", *(str(sum(each.verdict == verdict for each in held)) for verdict in verdicts), style="bold")
    return table
