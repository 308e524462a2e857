"""`kvref replay`: makes the calls of a trace again, and reports the first reply that differs."""

import argparse
from pathlib import Path

from rich.console import Console
from rich.text import Text

from kvref_conformance.clauses import all_clauses
from kvref_conformance.exceptions import CannotRun, NotOffered, require_file
from kvref_conformance.implementations import call_timeout, selected_name
from kvref_conformance.oracle.model_runner import UnknownObject
from kvref_conformance.runner.options import Effort, RunOptions
from kvref_conformance.runner.replay import replay_saved_trace
from kvref_conformance.runner.subprocess_runner import make_runner
from kvref_conformance.traces.format import read_trace


def replay_trace(options: argparse.Namespace) -> int:
    require_file("FILE", options.trace, "kvref check writes the traces of failures to .kvref/failures")
    trace = read_trace(Path(options.trace))
    name = selected_name(options) or trace.header.implementation.get("load", trace.header.implementation["name"])
    effort = Effort(seed=trace.header.seed, slow=True, real=True, timeout=call_timeout(options, name))
    judge = make_runner(RunOptions(name, effort, isolate=options.isolate))
    try:
        replay = replay_saved_trace(trace, judge)
    except NotOffered as missing:
        raise CannotRun(f"{name} does not offer {missing}") from missing
    except UnknownObject as unknown:
        raise CannotRun(f"{options.trace}: no model can predict the reply to {unknown}") from unknown
    finally:
        judge.close()
    console, clause = Console(highlight=False), all_clauses().get(trace.header.clause)
    heading = f"{trace.header.clause} · {clause.title if clause else trace.header.check}   ({name})"
    console.print(Text(heading, style="bold red" if replay.mismatch_line else "bold"), soft_wrap=True)
    for call in replay.calls:
        console.print(Text(f"  {call}"), soft_wrap=True)
    if not replay.calls:
        raise CannotRun(f"{options.trace}: no call could be made, so {name} is not judged")
    if replay.missing:
        console.print(Text(f"not offered, and skipped: {', '.join(replay.missing)}", style="dim"))
    if not replay.mismatch_line:
        console.print(Text("every reply is as expected", style="bold green"))
        return 0
    console.print(Text(f"    {replay.what}\n    expected {replay.expected}\n    got      {replay.got}"), soft_wrap=True)
    recorded = trace.header.failed or {}
    as_recorded = recorded.get("got") == replay.got
    if as_recorded and "cause" in recorded:
        console.print(Text(f"    cause    {recorded['cause']}"), soft_wrap=True)
    where = (
        f"first mismatch at line {replay.mismatch_line} of {options.trace}{', the same reply as recorded' if as_recorded else ''}"
    )
    console.print(Text(where, style="bold red"), soft_wrap=True)
    return 1
