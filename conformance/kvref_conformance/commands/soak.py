"""`kvref soak`: runs a serving workload on every family that stores tokens, or on a server."""

import argparse
import json
import math
import shlex
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from kvref_canary.server.url import SERVER_PREFIX
from kvref_conformance.calls import interrupts
from kvref_conformance.commands.soak_server import soak_server
from kvref_conformance.exceptions import CannotRun, suggest
from kvref_conformance.implementation_api import offers
from kvref_conformance.implementations import call_timeout, require_folder, required_name
from kvref_conformance.results import CheckResult
from kvref_conformance.runner.capabilities import probe_operations
from kvref_conformance.runner.check_runner import CheckRunner, Failure, RunEnded
from kvref_conformance.runner.options import Effort, RunOptions
from kvref_conformance.runner.subprocess_runner import make_runner
from kvref_conformance.soak.cache_console import print_figures, print_violation, progress_bar
from kvref_conformance.soak.cache_soak import SoakStatistics, a_serving_workload, run_soak
from kvref_conformance.soak.drivers import room_errors, soak_families
from kvref_conformance.testlib.registry import Check
from kvref_conformance.traces.paths import save_failure

FAILURES = Path(".kvref/failures")


def soak_implementation(options: argparse.Namespace) -> int:
    options.name = required_name(options)
    if not 0 < options.minutes < math.inf:
        raise CannotRun(f"--minutes: expected a finite number above 0, got {options.minutes:g}")
    if options.seed < 0:
        raise CannotRun(f"--seed: expected an integer of at least 0, got {options.seed}")
    if options.family is not None and options.family not in soak_families():
        known = ", ".join(soak_families())
        raise CannotRun(f"--family: expected one of {known}, got {options.family!r}{suggest(options.family, soak_families())}")
    require_folder("json", options.json)
    if options.name.startswith(SERVER_PREFIX):
        return soak_server(options)
    for option in ("concurrency", "plot"):
        if getattr(options, option) is not None:
            raise CannotRun(f"--{option}: expected also --server URL: only a server gets several requests at once")
    judge = make_runner(
        RunOptions(options.name, Effort(seed=options.seed, timeout=call_timeout(options, options.name)), isolate=options.isolate)
    )
    try:
        return _run_soak(options, judge)
    finally:
        judge.close()


def _run_soak(options: argparse.Namespace, judge: CheckRunner) -> int:
    families = [each for each in soak_families() if offers(judge.implementation, each) and options.family in (None, each)]
    if not families:
        raise CannotRun(f"{options.name}: nothing to soak, it does not offer {options.family or ' or '.join(soak_families())}")
    console, latest, broken = Console(highlight=False), dict[str, SoakStatistics](), dict[str, CheckResult]()
    interrupted = False
    for family in families:
        try:
            with progress_bar(Console(stderr=True), judge, latest):
                latest.setdefault(family, SoakStatistics(family))
                failure = _soak_family(options, judge, family, 60 * options.minutes / len(families), latest)
            if failure is not None:
                broken[family] = judge.shrink_failure(failure)
                saved = save_failure([broken[family]], FAILURES, f"LAW-18-{family}", options.name)
                again = shlex.join(_repeat_command(options, family))
                print_violation(console, "LAW-18", broken[family], options.name, _replayable_trace(saved), [("again", again)])
        except KeyboardInterrupt:
            interrupted = True
            break
    figures = [each for each in latest.values() if each.events or each.not_offered or each.family in broken]
    print_figures(console, figures, broken)
    if options.json:
        _write_json(Path(options.json), options, judge, figures, broken, interrupted)
    return _print_verdict(console, options, figures, broken, interrupted)


def _soak_family(
    options: argparse.Namespace, judge: CheckRunner, family: str, seconds: float, latest: dict[str, SoakStatistics]
) -> Failure | None:
    check = Check("LAW-18", family, a_serving_workload)
    try:
        status = judge.run(probe_operations, (family,))[family]
        soaked = judge.run(run_soak, family, options.seed, seconds)
    except RunEnded as ended:  # only the last call is known
        return Failure(check, ended.call_trace, ended.violation)
    latest[family], called = soaked.figures, soaked.figures.operations
    if not soaked.figures.not_offered:
        names = [op.partition(".")[2] for op in status.operations]
        soaked.figures.not_exercised = [name for name in names if name not in called]
        if not soaked.figures.refused and room_errors(family):
            soaked.figures.not_exercised.append("a call without room")
    if soaked.failure is None or soaked.failure.violation is None:
        return None
    return Failure(check, soaked.failure.call_trace, soaked.failure.violation)


def _replayable_trace(saved: tuple[CheckResult, Path] | None) -> Path | None:
    """The trace, if a replay can show the failure. If the trace is too large or the process died, only the soak can show it."""
    return saved[1] if saved and json.loads(saved[0].trace[0])["judge"] == "model" else None


def _repeat_command(options: argparse.Namespace, family: str) -> list[str]:
    command = ["kvref", "soak", options.name, "--family", family, "--minutes", f"{options.minutes:g}"]
    return [*command, "--seed", str(options.seed)] if options.seed else command


def _write_json(
    path: Path,
    options: argparse.Namespace,
    judge: CheckRunner,
    figures: list[SoakStatistics],
    broken: dict[str, CheckResult],
    interrupted: bool,
) -> None:
    said = {"name": options.name, "version": judge.implementation.version, "seed": options.seed, "minutes": options.minutes}
    families = []
    for each in figures:
        outcome = broken.get(each.family)
        failed = outcome and {"what": outcome.what, "expected": outcome.expected, "got": outcome.got}
        families.append({**asdict(each), "tokens_checked_a_second": each.rate, "failed": failed})
    path.write_text(json.dumps({**said, "interrupted": interrupted, "families": families}, indent=1) + "\n", encoding="utf-8")


def _print_verdict(
    console: Console,
    options: argparse.Namespace,
    figures: list[SoakStatistics],
    broken: dict[str, CheckResult],
    interrupted: bool,
) -> int:
    if broken:
        console.print(Text(f"not conformant: breaks LAW-18 ({', '.join(broken)})", style="bold red"))
    if interrupted:
        console.print(Text("interrupted: these are the results until the interruption", style="bold yellow"))
        return interrupts.EXIT_INTERRUPTED
    if broken:
        return 1
    if not any(each.tokens_checked for each in figures):
        console.print(Text("not judged: no token was checked", style="bold yellow"))
        return 2
    checked = sum(each.tokens_checked for each in figures)
    console.print(Text(f"passed: all {checked:,} checked tokens were right", style="bold green"))
    return 0
