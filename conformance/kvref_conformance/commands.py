"""What the commands do. `check` is a thin face over pytest: the same tests, another reporter."""

import argparse
import os
from difflib import get_close_matches
from pathlib import Path
from unittest.mock import patch

import pytest
from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from kvref_conformance.checking.registry import all_checks
from kvref_conformance.clauses import Clause, all_clauses, spec
from kvref_conformance.implementations import CannotRun, load, names
from kvref_conformance.interface import FAMILIES
from kvref_conformance.judge import Effort, Judge, select
from kvref_conformance.outcome import NotOffered
from kvref_conformance.report.json_file import write_json
from kvref_conformance.report.live import Live
from kvref_conformance.report.text import Asked, print_conclusion, print_failures, print_table
from kvref_conformance.trace.file import read
from kvref_conformance.trace.replay import replay


def run(options: argparse.Namespace) -> int:
    """Returns the exit code. Raises CannotRun, SpecError, CheckError."""
    if options.command == "check":
        return check(options)
    if options.command == "replay":
        return replay_trace(options)
    if options.command == "list":
        return list_implementations()
    return explain(options.clause)


def _refuse_nonsense(options: argparse.Namespace) -> None:
    if options.family is not None and options.family not in FAMILIES:
        raise CannotRun(f"--family: expected one of {', '.join(FAMILIES)}, got {options.family!r}")
    if options.seed < 0:
        raise CannotRun(f"--seed: expected an integer of at least 0, got {options.seed}")
    for option in ("json", "junit"):
        file = getattr(options, option)
        if file and not Path(file).resolve().parent.is_dir():
            raise CannotRun(f"--{option}: no folder {Path(file).resolve().parent}")
        if file and Path(file).is_dir():
            raise CannotRun(f"--{option}: {file} is a folder")


def check(options: argparse.Namespace) -> int:
    _refuse_nonsense(options)
    implementation = load(options.name)
    if options.family and not hasattr(implementation, options.family):
        raise CannotRun(f"{options.name}: nothing to test, it does not offer the family {options.family}")
    chosen = select(options.clause, options.family)
    if not chosen:
        near = get_close_matches(options.clause.upper(), list(all_clauses()), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise CannotRun(
            f"--clause {options.clause}: no clause matches{f' in family {options.family}' if options.family else ''}{hint}"
        )
    console = Console(highlight=False)
    if options.list:
        for clause, checks in chosen.items():
            console.print(Text(f"{clause.id} · {clause.title}", style="bold"))
            for each in checks:
                console.print(Text(f"  {each.name}{'  [--slow]' if each.slow else ''}"))
        return 0

    live = _run_pytest(options)
    if live.interrupted:
        raise KeyboardInterrupt
    if live.trouble:
        raise CannotRun(live.trouble[0].strip().splitlines()[-1])
    order = {clause.id: number for number, clause in enumerate(chosen)}
    results = sorted(live.results, key=lambda result: order[result["clause"]])
    print_failures(console, results, Asked(options.name, options.seed, options.family, options.slow))
    print_table(console, results, implementation)
    print_conclusion(console, results)
    if options.json:
        write_json(Path(options.json), implementation, options.seed, results)
    verdicts = {result["verdict"] for result in results}
    if not verdicts & {"passed", "failed"}:
        raise CannotRun(f"{options.name}: nothing to test, it offers nothing these clauses are about")
    return 1 if "failed" in verdicts else 0


def _run_pytest(options: argparse.Namespace) -> Live:
    # A terminal of our own: pytest captures the two standard streams, where the implementation may print.
    with os.fdopen(os.dup(2), "w") as stream:
        live = Live(Console(file=stream))
        arguments = ["--pyargs", "kvref_conformance.checks", "-c", os.devnull, "--rootdir", str(Path(__file__).parent)]
        arguments += ["-p", "no:terminal", "-p", "no:cacheprovider", "-p", "kvref_conformance.plugin", "--noconftest"]
        arguments += [f"--kvref={options.name}", f"--kvref-clause={options.clause}", f"--kvref-seed={options.seed}"]
        arguments += [f"--kvref-family={options.family}"] if options.family else []
        arguments += [f"--kvref-examples={options.examples}", f"--kvref-timeout={options.timeout}"]
        arguments += ["--kvref-slow"] if options.slow else []
        arguments += ["--kvref-deep"] if options.deep else []
        arguments += ["--kvref-isolate"] if options.isolate else []
        arguments += [f"--kvref-traces={options.traces}"] if options.traces else []
        arguments += [f"--junitxml={options.junit}"] if options.junit else []
        environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
        with patch.dict(os.environ, environment):
            code = pytest.main(arguments, plugins=[live])
        if code == pytest.ExitCode.INTERRUPTED and not live.trouble:
            live.interrupted = True
        elif code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR) and not live.trouble:
            live.trouble.append(f"pytest stopped with exit code {int(code)}")
        return live


def replay_trace(options: argparse.Namespace) -> int:
    trace = read(Path(options.trace))
    name = options.name or trace.header.implementation.get("load", trace.header.implementation["name"])
    judge = Judge(load(name), Effort(seed=trace.header.seed, timeout=options.timeout), name)
    try:
        held = replay(trace, judge)
    except NotOffered as missing:
        raise CannotRun(f"{name} does not offer {missing}") from missing
    console, clause = Console(highlight=False), all_clauses().get(trace.header.clause)
    heading = f"{trace.header.clause} · {clause.title if clause else 'not a clause of this kvref'}   ({name})"
    console.print(Text(heading, style="bold red" if held.parted else "bold"))
    for call in held.calls:
        console.print(Text(f"  {call}"), soft_wrap=True)
    if not held.parted:
        console.print(Text("every reply is as it must be", style="bold green"))
        return 0
    console.print(Text(f"    {held.what}\n    expected {held.expected}\n    got      {held.got}"), soft_wrap=True)
    where = f"they part at line {held.line} of {options.trace}" if held.line else "they part before the end of the trace"
    recorded = trace.header.failed
    if recorded and recorded["got"] == held.got:
        where += ", as recorded"
    console.print(Text(where, style="bold red"), soft_wrap=True)
    return 1


def list_implementations() -> int:
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("implementation", no_wrap=True)
    table.add_column("here")
    for listed in names():
        table.add_row(listed.name, Text(listed.missing, style="yellow") if listed.missing else Text("ready", style="green"))
    console.print(table)
    return 0


def explain(name: str) -> int:
    console = Console(highlight=False)
    chapters = {chapter.code: chapter for chapter in spec()}
    if name.upper() in chapters:
        chapter = chapters[name.upper()]
        console.print(Markdown(f"# {chapter.title} ({chapter.code})\n\n{chapter.intro}"))
        console.print()
        for each in chapter.clauses:
            console.print(Text.assemble((each.id, "bold"), f"  {each.title}"))
        return 0
    clause = all_clauses().get(name.upper())
    if clause is None:
        near = get_close_matches(name.upper(), [*all_clauses(), *chapters], n=1)
        raise CannotRun(f"no clause {name!r}{f': did you mean {near[0]}?' if near else ''} (chapters: {', '.join(chapters)})")
    console.print(Markdown(_clause_markdown(clause)))
    return 0


def _clause_markdown(clause: Clause) -> str:
    parts = [f"# {clause.id} · {clause.title}", clause.text, f"*Why.* {clause.why}", f"```python\n{clause.example}\n```"]
    if clause.differs:
        parts.append(f"*Differs from.* {clause.differs}")
    if clause.caught:
        parts.append(f"*Would have caught.* {clause.caught}")
    checks = [each for each in all_checks() if each.clause == clause.id]
    parts.append("*Checks.*\n\n" + "\n".join(f"- {each.name}{', with --slow' if each.slow else ''}" for each in checks))
    return "\n\n".join(parts)
