"""`kvref check`: runs the checks as pytest tests, with a reporter of its own."""

import argparse
import os
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from kvref_conformance.calls import interrupts
from kvref_conformance.clauses import Clause
from kvref_conformance.commands.check_list import list_checks, list_reach
from kvref_conformance.drivers.resource_limits import collect_rarely
from kvref_conformance.families import names as families
from kvref_conformance.implementation_api import offers
from kvref_conformance.implementations import existing_folder, named, needed, patience
from kvref_conformance.outcome import CannotRun
from kvref_conformance.report.console import (
    Result,
    print_conclusion,
    print_derived,
    print_interrupted,
    print_left_out,
    print_table,
)
from kvref_conformance.report.console_live import Live
from kvref_conformance.report.json_file import write_json
from kvref_conformance.runner import expected_failures
from kvref_conformance.runner.check_runner import CheckRunner, select
from kvref_conformance.runner.options import Effort, RunOptions
from kvref_conformance.runner.parallel import side_by_side, usual_jobs
from kvref_conformance.runner.start import make_runner
from kvref_conformance.runner.verdict import EXIT_STATUS, conclude
from kvref_conformance.testlib.registry import Check


def check(options: argparse.Namespace) -> int:
    options.name = named(options) if options.list else needed(options)
    options.timeout = patience(options, options.name or "")
    _refuse_nonsense(options)
    expected = _expected_failures(options)
    chosen = _chosen(options)
    console = Console(highlight=False)
    if options.list and options.name is None:
        list_checks(console, chosen)
        return 0
    searched = options.seed, options.slow, options.real, options.examples, options.deep
    effort = Effort(*searched, options.timeout, keep=options.traces is not None)
    asked = RunOptions(options.name, effort, options.family, options.isolate, options.stderr)
    collect_rarely()
    with closing(_judge(asked)) as judge:
        if options.list:
            list_reach(console, options, judge, chosen)
            return 0
        with side_by_side(judge, chosen, options.jobs or usual_jobs(asked, everything=_wanted(options) == "*")):
            results = _results(options, asked, judge, chosen, console.width)
    interrupted = len(results) < len(chosen)
    conclusion = conclude(results, options.least_judged, interrupted)
    print_table(console, results, judge.implementation, interrupted)
    print_derived(console, results)
    if not interrupted:
        print_left_out(console, results)
    if options.json:
        write_json(Path(options.json), judge.implementation, asked, results, conclusion, interrupted)
    if interrupted:
        print_interrupted(console, results, len(chosen))
        return interrupts.EXIT_INTERRUPTED
    if not conclusion.of:
        not_run = [result for result in results if result["verdict"] == "not run"]
        with_option = [f"{result['clause']} runs with {', '.join(result['missing'])}" for result in not_run]
        why = ", ".join(with_option) or "it offers no family of the selected clauses"
        raise CannotRun(f"{options.name}: nothing to test, {why}")
    if options.update_xfails:
        expected_failures.update(Path(options.xfails), {result["clause"]: result["verdict"] for result in results})
        now = len(expected_failures.read(Path(options.xfails)))
        console.print(Text(f"{options.xfails}: {now} expected failures, {len(expected)} before"))
    print_conclusion(console, results, conclusion)
    if options.update_xfails and conclusion.enough:
        return 0  # the failures of this run are expected failures from now on
    return EXIT_STATUS[conclusion.verdict]


def _refuse_nonsense(options: argparse.Namespace) -> None:
    if options.family is not None and options.family not in families():
        raise CannotRun(f"--family: expected one of {', '.join(families())}, got {options.family!r}")
    if not 0 <= options.least_judged <= 100:
        raise CannotRun(f"--least-judged: expected a percentage, 0 to 100, got {options.least_judged:g}")
    for option, least in (("seed", 0), ("examples", 1), ("jobs", 1)):
        value = getattr(options, option)
        if value is not None and value < least:
            raise CannotRun(f"--{option}: expected an integer of at least {least}, got {value}")
    for option in ("json", "junit", "xfails"):
        existing_folder(option, getattr(options, option))
    if options.traces and Path(options.traces).exists() and not Path(options.traces).is_dir():
        raise CannotRun(f"--traces: expected a folder, got the file {options.traces}")
    if options.stderr and options.isolate:
        raise CannotRun("--stderr: expected no --isolate: a program already runs in its own process")
    if (options.jobs or 1) > 1 and (options.isolate is False or options.stderr):
        beside = "--stderr" if options.stderr else "--no-isolate"
        raise CannotRun(f"--jobs: expected no {beside}: several jobs run in processes of their own")
    if options.update_xfails and not options.xfails:
        raise CannotRun("--update-xfails: expected also --xfails FILE, the file to write")


def _expected_failures(options: argparse.Namespace) -> dict[str, str]:
    if not options.xfails or (options.update_xfails and not Path(options.xfails).exists()):
        return {}
    return expected_failures.read(Path(options.xfails))


def _chosen(options: argparse.Namespace) -> dict[Clause, list[Check]]:
    try:
        return select(_wanted(options), options.family)
    except CannotRun as error:
        raise CannotRun(f"--clause {error}") from None


def _wanted(options: argparse.Namespace) -> str:
    return ",".join(options.clause or ["*"])


def _judge(asked: RunOptions) -> CheckRunner:
    judge = make_runner(asked)
    interrupts.look()
    if asked.family and not offers(judge.implementation, asked.family):
        judge.close()
        raise CannotRun(f"{asked.name}: nothing to test, it does not offer the family {asked.family}")
    return judge


def _results(
    options: argparse.Namespace, asked: RunOptions, judge: CheckRunner, chosen: dict[Clause, list[Check]], width: int
) -> list[Result]:
    """The results of all selected clauses, in the order of the specification; fewer if interrupted. Raises CannotRun."""
    # Copies of the standard streams: pytest captures the originals, because the implementation may print to them.
    with os.fdopen(os.dup(1), "w") as out, os.fdopen(os.dup(2), "w") as err, interrupts.wait():
        live = Live(Console(file=out, highlight=False, width=width), Console(file=err, width=width), asked, judge)
        arguments = ["--pyargs", "kvref_conformance.families", "-c", os.devnull, "--rootdir", str(Path(__file__).parents[1])]
        arguments += ["-p", "no:terminal", "-p", "no:cacheprovider", "-p", "kvref_conformance.pytest_plugin", "--noconftest"]
        arguments += [f"--kvref={options.name}", f"--kvref-clause={_wanted(options)}", f"--kvref-seed={options.seed}"]
        arguments += [f"--kvref-family={options.family}"] if options.family else []
        arguments += [f"--kvref-traces={options.traces}"] if options.traces else []
        arguments += [f"--kvref-xfails={options.xfails}"] if options.xfails and Path(options.xfails).exists() else []
        arguments += [f"--junitxml={options.junit}"] if options.junit else []
        # For a debugger: show what the implementation prints, and leave breakpoint() to Python.
        arguments += ["--capture=no", "-p", "no:debugging"] if asked.isolate is False else []
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
            patch.setenv("PYTEST_ADDOPTS", "")
            code = pytest.main(arguments, plugins=[live])
    if code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR) and not live.trouble:
        raise CannotRun(f"pytest stopped with exit code {int(code)}")
    if live.unread:
        raise BrokenPipeError
    if live.trouble:
        raise CannotRun(live.trouble[0].strip().splitlines()[-1])
    order = {clause.id: number for number, clause in enumerate(chosen)}
    return sorted(live.results, key=lambda result: order[result["clause"]])
