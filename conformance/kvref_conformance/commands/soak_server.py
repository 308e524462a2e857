"""`kvref soak --server`: sends many requests to a server at once, and checks every generated token."""

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from kvref_canary.server.url import parse_address
from kvref_conformance.calls import interrupts
from kvref_conformance.exceptions import CannotRun
from kvref_conformance.implementations import call_timeout, require_folder
from kvref_conformance.implementations.server import ServerImplementation
from kvref_conformance.soak.server_statistics import ServerStatistics

DEFAULT_CONCURRENCY = 8
MAX_CONCURRENCY = 1024  # requests at once: the usual limit of open files per process


def soak_server(options: argparse.Namespace) -> int:
    for option in ("family", "isolate"):
        if getattr(options, option) is not None:
            raise CannotRun(f"--{option}: expected no --{option} with --server")
    concurrency = DEFAULT_CONCURRENCY if options.concurrency is None else options.concurrency
    if not 1 <= concurrency <= MAX_CONCURRENCY:
        raise CannotRun(f"--concurrency: expected 1 to {MAX_CONCURRENCY}, got {concurrency}")
    silence = call_timeout(options, options.name)
    require_folder("plot", options.plot)
    served = ServerImplementation(parse_address(options.name), silence)
    try:
        return _run_soak(options, served, concurrency)
    finally:
        served.close()


def _run_soak(options: argparse.Namespace, served: ServerImplementation, concurrency: int) -> int:
    from kvref_conformance.soak import server_console  # they need packages whose presence `ServerImplementation` has checked
    from kvref_conformance.soak.server_soak import ServerSoak

    soak, seconds = ServerSoak(served.asker, options.seed, concurrency), 60 * options.minutes
    console, figures, interrupted = Console(highlight=False), soak.figures, False
    about = f"{served.name} {served.version} ({served.language}), {concurrency} requests at a time"
    console.print(Text(about, style="bold"), soft_wrap=True)
    try:
        with server_console.progress_bar(Console(stderr=True), figures, seconds) as tell:
            served.background.run(soak.run(seconds), tell)
    except KeyboardInterrupt:
        interrupted = True
    soak.explain()
    server_console.print_report(console, served.canary, figures)
    if options.json:
        said: dict[str, Any] = {"name": options.name, "served": about, "seed": options.seed, "minutes": options.minutes}
        said |= {"concurrency": concurrency, "interrupted": interrupted, **figures.document()}
        Path(options.json).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        Path(options.plot).write_text(server_console.make_plot(figures, about), encoding="utf-8")
    return _print_verdict(console, figures, interrupted)


def _print_verdict(console: Console, figures: ServerStatistics, interrupted: bool) -> int:
    failed = figures.failed.total()
    if figures.wrong_tokens:
        what = f"{figures.wrong_tokens:,} wrong tokens in {figures.wrong_requests:,} answers"
        console.print(Text(f"not conformant: {what}", style="bold red"))
    if failed:
        console.print(Text(f"not conformant: {failed:,} requests failed", style="bold red"))
    if interrupted:
        console.print(Text("interrupted: these are the results until the interruption", style="bold yellow"))
        return interrupts.EXIT_INTERRUPTED
    if figures.wrong_tokens or failed:
        return 1
    if not figures.tokens_checked:
        console.print(Text("not judged: no token was checked", style="bold yellow"))
        return 2
    asked = figures.requests.total() + figures.refused
    if 2 * figures.refused > asked:
        what = f"the server rejected {figures.refused:,} of {asked:,} requests because it had no room"
        console.print(Text(f"not judged: {what}", style="bold yellow"))
        return 2
    console.print(Text(f"passed: all {figures.tokens_checked:,} checked tokens were right", style="bold green"))
    return 0
