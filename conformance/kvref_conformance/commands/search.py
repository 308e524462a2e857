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
from kvref_conformance.exceptions import CannotRun, suggest
from kvref_conformance.families import all_families
from kvref_conformance.fuzz.campaign import Campaign, CampaignListener, WorkerPool
from kvref_conformance.fuzz.console import CampaignConsole, print_summary
from kvref_conformance.fuzz.corpus import CampaignRun, Corpus, KnownFailure, default_corpus_folder, lock_corpus, open_corpus
from kvref_conformance.fuzz.html_report import write_page
from kvref_conformance.fuzz.seed_scheduler import SeedScheduler
from kvref_conformance.fuzz.work_unit import UnitFailure
from kvref_conformance.fuzz.worker_tasks import RecheckResult, check_indices
from kvref_conformance.implementation_api import offers
from kvref_conformance.implementations import call_timeout, required_name
from kvref_conformance.report.console import count_noun
from kvref_conformance.runner.options import Effort
from kvref_conformance.runner.subprocess_runner import SubprocessRunner
from kvref_conformance.soak.drivers import soak_families
from kvref_conformance.traces.paths import save_failure

FAILURES = Path(".kvref/failures")


def search_implementation(options: argparse.Namespace) -> int:
    options.name = required_name(options)
    seconds = _search_seconds(options)
    if options.seed < 0:
        raise CannotRun(f"--seed: expected an integer of at least 0, got {options.seed}")
    if options.family is not None and options.family not in all_families():
        known = ", ".join(all_families())
        raise CannotRun(f"--family: expected one of {known}, got {options.family!r}{suggest(options.family, all_families())}")
    if options.workers is not None and (options.workers < 1 or options.cluster):
        wanted = "no --cluster, which has its own workers" if options.cluster else f"at least 1, got {options.workers}"
        raise CannotRun(f"--workers: expected {wanted}")
    try:
        from kvref_conformance.fuzz.dask_pool import DaskPool
    except ImportError as error:
        raise CannotRun(f"search needs {error.name} (in a clone: pip install '.[search]')") from None
    folder = Path(options.corpus) if options.corpus else default_corpus_folder(options.name)
    timeout = call_timeout(options, options.name)
    with lock_corpus(folder):
        corpus = open_corpus(folder, options.name)
        scheduler = _make_scheduler(options, corpus, timeout)
        workers = DaskPool(options.name, timeout, options.workers or _count_processors(), options.cluster)
        try:
            return _run_search(options, corpus, scheduler, workers, seconds)
        finally:
            workers.close()


def _search_seconds(options: argparse.Namespace) -> float:
    """The duration of the search: --hours plus --minutes. Raises CannotRun."""
    if options.hours is None and options.minutes is None:
        raise CannotRun("expected --hours N or --minutes N, the duration of the search")
    for option in ("hours", "minutes"):
        value = getattr(options, option)
        if value is not None and not 0 < value < math.inf:
            raise CannotRun(f"--{option}: expected a finite number above 0, got {value:g}")
    return 3600 * (options.hours or 0.0) + 60 * (options.minutes or 0.0)


def _count_processors() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _make_scheduler(options: argparse.Namespace, corpus: Corpus, timeout: float) -> SeedScheduler:
    """Covers the offered families and continues from the corpus. Raises CannotRun if the implementation cannot be loaded."""
    judge = SubprocessRunner(options.name, Effort(timeout=timeout))
    judge.close()
    families = [each for each in all_families() if offers(judge.implementation, each) and options.family in (None, each)]
    if options.family and not families:
        raise CannotRun(f"{options.name}: nothing to search, it does not offer the family {options.family}")
    machines = [family for family in families if all_families()[family].state_machine]
    checks = {family: len(places) for family in families if (places := check_indices(family))}
    scheduler = SeedScheduler(machines, checks, _merge_names(soak_families(), families), options.seed)
    scheduler.num_scheduled = dict(corpus.handed)
    return scheduler


def _merge_names(some: list[str], others: list[str]) -> list[str]:
    return [each for each in some if each in others]


def _run_search(
    options: argparse.Namespace, corpus: Corpus, scheduler: SeedScheduler, workers: WorkerPool, seconds: float
) -> int:
    console, name = Console(highlight=False), options.name
    shown = CampaignConsole(console, Console(stderr=True), name)

    def failed(known: KnownFailure, failed: UnitFailure) -> None:
        known.trace = _save_trace(corpus, known, failed, name)
        shown.show_failure(failed, _trace_path(known) if known.trace else None)

    def of_before(known: KnownFailure, came: RecheckResult) -> None:
        if known.trace and known not in corpus.failures:
            for path in (_trace_path(known), corpus.folder / "failures" / known.trace):
                path.unlink(missing_ok=True)
        shown.show_recheck(known, came)

    def write(campaign: Campaign) -> None:
        corpus.write()
        write_page(campaign, corpus.folder / "report.html")

    run = CampaignRun(datetime.now(UTC).isoformat(" ", "minutes"), options.seed, workers.count)
    corpus.runs.append(run)
    campaign = Campaign(
        workers, corpus, scheduler, run, CampaignListener(shown.show_progress, failed, of_before, shown.show_invalid_trace, write)
    )
    interrupted = False
    try:
        with interrupts.defer_interrupts(), shown.progress_bar(seconds):
            campaign.run_for(seconds)
    except KeyboardInterrupt:
        interrupted = True
    print_summary(console, campaign, corpus.folder)
    return _print_verdict(console, campaign, interrupted)


def _save_trace(corpus: Corpus, known: KnownFailure, failed: UnitFailure, name: str) -> str:
    """Write the trace to the folder of `kvref check` and into the corpus, which can be copied elsewhere. Its file name there."""
    for folder in (FAILURES, corpus.folder / "failures"):
        saved = save_failure([failed.outcome], folder, _trace_file_name(known), name)
    return saved[1].name if saved else ""


def _trace_file_name(known: KnownFailure) -> str:
    """A file name of the clause and a hash: several sequences of operations can break one clause."""
    return f"{known.clause}-{hashlib.sha256(' '.join(known.shape).encode()).hexdigest()[:8]}"


def _trace_path(known: KnownFailure) -> Path:
    return FAILURES / known.trace


def _print_verdict(console: Console, campaign: Campaign, interrupted: bool) -> int:
    failures = campaign.corpus.failures
    if failures:
        clauses = ", ".join(dict.fromkeys(each.clause for each in failures))
        console.print(Text(f"not conformant: breaks {clauses} ({count_noun(len(failures), 'failure')})", style="bold red"))
    if interrupted:
        console.print(Text("interrupted: these are the failures found before the interruption", style="bold yellow"))
        return interrupts.EXIT_INTERRUPTED
    if failures:
        return 1
    if not campaign.calls:
        console.print(Text("not judged: no call was made", style="bold yellow"))
        return 2
    console.print(Text(f"no failure found in {campaign.calls:,} calls", style="bold green"))
    return 0
