"""`kvref search`: state machines, checks and short soaks of one implementation, in many processes, for a given time."""

import argparse
import hashlib
import math
import os
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from kvref_conformance.calls import interrupts
from kvref_conformance.families import all_families
from kvref_conformance.fuzz.campaign import Campaign, Listener, WorkerPool
from kvref_conformance.fuzz.console import CampaignConsole, print_summary
from kvref_conformance.fuzz.corpus import CampaignRun, Corpus, KnownFailure, alone, folder_of, open_corpus
from kvref_conformance.fuzz.html_report import write_page
from kvref_conformance.fuzz.seed_scheduler import SeedScheduler
from kvref_conformance.fuzz.work_unit import UnitFailure
from kvref_conformance.fuzz.worker_tasks import Again, checks_of
from kvref_conformance.implementation_api import offers
from kvref_conformance.implementations import needed, patience
from kvref_conformance.outcome import CannotRun
from kvref_conformance.report.console import counted
from kvref_conformance.runner.options import Effort
from kvref_conformance.runner.subprocess_runner import SubprocessRunner
from kvref_conformance.soak.drivers import served
from kvref_conformance.traces.paths import save_failure

FAILURES = Path(".kvref/failures")


def search(options: argparse.Namespace) -> int:
    options.name = needed(options)
    seconds = _seconds(options)
    if options.seed < 0:
        raise CannotRun(f"--seed: expected an integer of at least 0, got {options.seed}")
    if options.workers is not None and (options.workers < 1 or options.cluster):
        wanted = "no --cluster, which has its own workers" if options.cluster else f"at least 1, got {options.workers}"
        raise CannotRun(f"--workers: expected {wanted}")
    try:
        from kvref_conformance.fuzz.dask_pool import DaskPool
    except ImportError as error:
        raise CannotRun(f"search needs {error.name} (in a clone: pip install '.[search]')") from None
    folder = Path(options.corpus) if options.corpus else folder_of(options.name)
    timeout = patience(options, options.name)
    with alone(folder):
        corpus = open_corpus(folder, options.name)
        steering = _steering(options, corpus, timeout)
        workers = DaskPool(options.name, timeout, options.workers or _processors(), options.cluster)
        try:
            return _searched(options, corpus, steering, workers, seconds)
        finally:
            workers.close()


def _seconds(options: argparse.Namespace) -> float:
    """The duration of the search: --hours plus --minutes. Raises CannotRun."""
    if options.hours is None and options.minutes is None:
        raise CannotRun("expected --hours N or --minutes N, the duration of the search")
    for option in ("hours", "minutes"):
        value = getattr(options, option)
        if value is not None and not 0 < value < math.inf:
            raise CannotRun(f"--{option}: expected a finite number above 0, got {value:g}")
    return 3600 * (options.hours or 0.0) + 60 * (options.minutes or 0.0)


def _processors() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _steering(options: argparse.Namespace, corpus: Corpus, timeout: float) -> SeedScheduler:
    """Covers the offered families and continues from the corpus. Raises CannotRun if the implementation cannot be loaded."""
    judge = SubprocessRunner(options.name, Effort(timeout=timeout))
    judge.close()
    families = [family for family in all_families() if offers(judge.implementation, family)]
    machines = [family for family in families if all_families()[family].state_machine]
    checks = {family: len(places) for family in families if (places := checks_of(family))}
    steering = SeedScheduler(machines, checks, _both(served(), families), options.seed)
    steering.handed = dict(corpus.handed)
    return steering


def _both(some: list[str], others: list[str]) -> list[str]:
    return [each for each in some if each in others]


def _searched(options: argparse.Namespace, corpus: Corpus, steering: SeedScheduler, workers: WorkerPool, seconds: float) -> int:
    console, name = Console(highlight=False), options.name
    shown = CampaignConsole(console, Console(stderr=True), name)

    def failed(known: KnownFailure, failed: UnitFailure) -> None:
        known.trace = _save(corpus, known, failed, name)
        shown.failed(failed, _trace(known) if known.trace else None)

    def of_before(known: KnownFailure, came: Again) -> None:
        if known.trace and known not in corpus.failures:
            for path in (_trace(known), corpus.folder / "failures" / known.trace):
                path.unlink(missing_ok=True)
        shown.of_before(known, came)

    def write(exploring: Campaign) -> None:
        corpus.write()
        write_page(exploring, corpus.folder / "report.html")

    run = CampaignRun(datetime.now(UTC).isoformat(" ", "minutes"), options.seed, workers.count)
    corpus.runs.append(run)
    exploring = Campaign(workers, corpus, steering, run, Listener(shown.tell, failed, of_before, shown.spoiled, write))
    interrupted = False
    try:
        with interrupts.wait(), shown.bar(seconds):
            exploring.go(seconds)
    except KeyboardInterrupt:
        interrupted = True
    print_summary(console, exploring, corpus.folder)
    return _concluded(console, exploring, interrupted)


def _save(corpus: Corpus, known: KnownFailure, failed: UnitFailure, name: str) -> str:
    """Write the trace to the folder of `kvref check` and into the corpus, which can be copied elsewhere. Its file name there."""
    for folder in (FAILURES, corpus.folder / "failures"):
        saved = save_failure([failed.outcome], folder, _file(known), name)
    return saved[1].name if saved else ""


def _file(known: KnownFailure) -> str:
    """A file name of the clause and a hash: several sequences of operations can break one clause."""
    return f"{known.clause}-{hashlib.sha256(' '.join(known.shape).encode()).hexdigest()[:8]}"


def _trace(known: KnownFailure) -> Path:
    return FAILURES / known.trace


def _concluded(console: Console, exploring: Campaign, interrupted: bool) -> int:
    failures = exploring.corpus.failures
    if failures:
        clauses = ", ".join(dict.fromkeys(each.clause for each in failures))
        console.print(Text(f"not conformant: breaks {clauses} ({counted(len(failures), 'failure')})", style="bold red"))
    if interrupted:
        console.print(Text("interrupted: these are the failures found before the interruption", style="bold yellow"))
        return interrupts.EXIT_INTERRUPTED
    if failures:
        return 1
    if not exploring.calls:
        console.print(Text("not judged: no call was made", style="bold yellow"))
        return 2
    console.print(Text(f"no failure found in {exploring.calls:,} calls", style="bold green"))
    return 0
