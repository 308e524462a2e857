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
from kvref_conformance.commands.check_list import list_checks, list_coverage
from kvref_conformance.drivers.resource_limits import collect_rarely
from kvref_conformance.exceptions import CannotRun, require_file, suggest
from kvref_conformance.families import names as families
from kvref_conformance.implementation_api import offers
from kvref_conformance.implementations import call_timeout, require_folder, required_name, selected_name
from kvref_conformance.report.console import (
    print_conclusion,
    print_derived,
    print_failures,
    print_interrupted,
    print_left_out,
    print_table,
)
from kvref_conformance.report.console_live import LiveReporter
from kvref_conformance.report.json_file import read_json, write_json
from kvref_conformance.report.junit import add_properties
from kvref_conformance.results import Result
from kvref_conformance.runner import expected_failures
from kvref_conformance.runner.check_runner import CheckRunner, select_checks
from kvref_conformance.runner.options import Effort, RunOptions
from kvref_conformance.runner.parallel import default_jobs, run_in_parallel
from kvref_conformance.runner.subprocess_runner import make_runner
from kvref_conformance.runner.verdict import EXIT_STATUS, overall_verdict
from kvref_conformance.testlib.registry import Check

FAILURES_SINCE = ".kvref/failures-since.txt"


def check(options: argparse.Namespace) -> int:
    options.name = selected_name(options) if options.list else required_name(options)
    options.family = [family for each in options.family or [] for family in each.split(",")]
    options.timeout = call_timeout(options, options.name or "")
    _reject_contradictory_options(options)
    if options.since:
        options.xfails = _write_failures_since(Path(options.since))
    expected = _expected_failures(options)
    chosen = _select_checks(options)
    console = Console(highlight=False)
    if options.list and options.name is None:
        list_checks(console, chosen)
        return 0
    searched = options.seed, options.slow, options.real, options.examples, options.deep
    effort = Effort(*searched, options.timeout, keep_traces=options.traces is not None)
    run_options = RunOptions(options.name, effort, _selected_families(options), options.isolate, options.stderr)
    collect_rarely()
    with closing(_make_judge(run_options)) as judge:
        if options.list:
            list_coverage(console, options, judge, chosen)
            return 0
        jobs = options.jobs or default_jobs(run_options, everything=_clause_pattern(options) == "*")
        with interrupts.defer_interrupts():  # Ctrl-C when the last check has ended must not lose the results
            with run_in_parallel(judge, chosen, jobs):
                results = _run_checks(options, run_options, judge, chosen, console.width)
            return _report_results(options, run_options, judge, chosen, results, expected, console)


def _report_results(
    options: argparse.Namespace, run_options: RunOptions, judge: CheckRunner, chosen: dict[Clause, list[Check]],
    results: list[Result], expected: dict[str, str], console: Console,
) -> int:  # fmt: skip
    """Print the table and the verdict, and write the files. Return the exit status. Raises CannotRun."""
    interrupted = len(results) < len(chosen)
    conclusion = overall_verdict(results, options.least_judged, interrupted)
    print_failures(console, results, run_options, options.all)
    print_table(console, results, judge.implementation, interrupted)
    print_derived(console, results)
    if not interrupted:
        print_left_out(console, results)
    if options.junit:
        add_properties(Path(options.junit), results)
    if options.json:
        write_json(Path(options.json), judge.implementation, run_options, results, conclusion, interrupted)
    if interrupted:
        print_interrupted(console, results, len(chosen))
        return interrupts.EXIT_INTERRUPTED
    if not conclusion.of:
        not_run = [result for result in results if result["verdict"] == "not run"]
        with_option = [f"{result['clause']} runs with {', '.join(result['missing'])}" for result in not_run]
        why = ", ".join(with_option) or "it offers no family of the selected clauses"
        raise CannotRun(f"{options.name}: nothing to test, {why}")
    if options.update_xfails:
        expected_failures.update_expected_failures(
            Path(options.xfails), {result["clause"]: result["verdict"] for result in results}
        )
        now = len(expected_failures.read_expected_failures(Path(options.xfails)))
        console.print(Text(f"{options.xfails}: {now} expected failures, {len(expected)} before"))
    print_conclusion(console, results, conclusion)
    if options.update_xfails and conclusion.is_enough:
        return 0  # the failures of this run are expected failures from now on
    return EXIT_STATUS[conclusion.verdict]


def _reject_contradictory_options(options: argparse.Namespace) -> None:
    for family in options.family:
        if family not in families():
            known = ", ".join(families())
            raise CannotRun(f"--family: expected one of {known}, got {family!r}{suggest(family, families())}")
    if not 0 <= options.least_judged <= 100:
        raise CannotRun(f"--least-judged: expected a percentage, 0 to 100, got {options.least_judged:g}")
    for option, least in (("seed", 0), ("examples", 1), ("jobs", 1)):
        value = getattr(options, option)
        if value is not None and value < least:
            raise CannotRun(f"--{option}: expected an integer of at least {least}, got {value}")
    for option in ("json", "junit", "xfails"):
        require_folder(option, getattr(options, option))
    if options.traces and Path(options.traces).exists() and not Path(options.traces).is_dir():
        raise CannotRun(f"--traces: expected a folder, got the file {options.traces}")
    if options.stderr and options.isolate:
        raise CannotRun("--stderr: expected no --isolate: a program already runs in its own process")
    if (options.jobs or 1) > 1 and (options.isolate is False or options.stderr):
        beside = "--stderr" if options.stderr else "--no-isolate"
        raise CannotRun(f"--jobs: expected no {beside}: several jobs run in processes of their own")
    if options.since and options.xfails:
        raise CannotRun("--since: expected no --xfails: the earlier results say which clauses are expected to fail")
    if options.update_xfails and not options.xfails:
        raise CannotRun("--update-xfails: expected also --xfails FILE, the file to write")


def _write_failures_since(results: Path) -> str:
    """Write the clauses that failed in earlier results to a file of expected failures. Return its path. Raises CannotRun."""
    require_file("--since", str(results), f"kvref check NAME --json {results} writes it")
    failed = [each["clause"] for each in read_json(results)["clauses"] if each["verdict"] in ("failed", "xfailed")]
    path = Path(FAILURES_SINCE)
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{clause}  failed in {results}\n" for clause in failed), encoding="utf-8")
    return str(path)


def _expected_failures(options: argparse.Namespace) -> dict[str, str]:
    if not options.xfails or (options.update_xfails and not Path(options.xfails).exists()):
        return {}
    require_file("--xfails", options.xfails, "--update-xfails writes it")
    return expected_failures.read_expected_failures(Path(options.xfails))


def _select_checks(options: argparse.Namespace) -> dict[Clause, list[Check]]:
    try:
        return select_checks(_clause_pattern(options), _selected_families(options))
    except CannotRun as error:
        raise CannotRun(f"--clause {error}") from None


def _clause_pattern(options: argparse.Namespace) -> str:
    return ",".join(options.clause or ["*"])


def _selected_families(options: argparse.Namespace) -> str | None:
    """The families that were named, separated by commas, or None."""
    return ",".join(options.family) or None


def _make_judge(run_options: RunOptions) -> CheckRunner:
    judge = make_runner(run_options)
    interrupts.raise_if_interrupted()
    families = run_options.family.split(",") if run_options.family else []
    if missing := [family for family in families if not offers(judge.implementation, family)]:
        judge.close()
        raise CannotRun(f"{run_options.name}: nothing to test, it does not offer the family {' or '.join(missing)}")
    return judge


def _run_checks(
    options: argparse.Namespace, run_options: RunOptions, judge: CheckRunner, chosen: dict[Clause, list[Check]], width: int
) -> list[Result]:
    """The results of all selected clauses, in the order of the specification; fewer if interrupted. Raises CannotRun."""
    # A copy of the standard error: pytest captures the original, because the implementation may print to it.
    with os.fdopen(os.dup(2), "w") as err, interrupts.defer_interrupts():
        live = LiveReporter(Console(file=err, highlight=False, width=width), run_options, judge)
        arguments = ["--pyargs", "kvref_conformance.families", "-c", os.devnull, "--rootdir", str(Path(__file__).parents[1])]
        arguments += ["-p", "no:terminal", "-p", "no:cacheprovider", "-p", "kvref_conformance.pytest_plugin", "--noconftest"]
        arguments += [f"--kvref={options.name}", f"--kvref-clause={_clause_pattern(options)}", f"--kvref-seed={options.seed}"]
        arguments += [f"--kvref-family={run_options.family}"] if run_options.family else []
        arguments += [f"--kvref-traces={options.traces}"] if options.traces else []
        arguments += [f"--kvref-xfails={options.xfails}"] if options.xfails and Path(options.xfails).exists() else []
        arguments += [f"--junitxml={options.junit}"] if options.junit else []
        # For a debugger: show what the implementation prints, and leave breakpoint() to Python.
        arguments += ["--capture=no", "-p", "no:debugging"] if run_options.isolate is False else []
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
            patch.setenv("PYTEST_ADDOPTS", "")
            code = pytest.main(arguments, plugins=[live])
    if code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR) and not live.trouble:
        raise CannotRun(f"pytest stopped with exit code {int(code)}")
    if live.trouble and "\n" in live.trouble[0].strip():
        raise RuntimeError(live.trouble[0].strip())  # the traceback of an error in the judge
    if live.trouble:
        raise CannotRun(live.trouble[0].strip())
    order = {clause.id: number for number, clause in enumerate(chosen)}
    return sorted(live.results, key=lambda result: order[result["clause"]])
