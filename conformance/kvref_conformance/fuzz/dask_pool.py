"""The worker processes of a search, managed by Dask: on this machine, or on an existing Dask cluster.

Dask distributes the tasks. If a worker dies, Dask starts another one and repeats the task.
"""

import logging
import multiprocessing
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from queue import Empty, Queue
from typing import Any

import dask
from distributed import Client, Future, LocalCluster
from distributed.comm import get_address_host_port
from distributed.scheduler import KilledWorker

from kvref_conformance.calls import interrupts
from kvref_conformance.exceptions import CannotRun
from kvref_conformance.fuzz.campaign import WorkersLost
from kvref_conformance.fuzz.worker_tasks import import_slow_modules, run_on_worker

CONNECT_TIMEOUT = 10.0  # seconds until the scheduler replies
START_TIMEOUT = 120.0  # seconds until a worker has started
QUERY_TIMEOUT = 5.0  # seconds between two counts of the workers
ANY_PORT = "127.0.0.1:0"  # Dask always serves a dashboard; it must not be reachable from other machines
LOG_LEVELS = {"distributed": "critical", "distributed.nanny": "critical", "distributed.worker": "critical", "bokeh": "critical"}


class DaskPool:
    """The worker processes. count: their current number."""

    def __init__(self, name: str, timeout: float, here: int, address: str | None) -> None:
        """here: number of processes on this machine. address: of a Dask scheduler whose workers are used instead, or None.

        Raises CannotRun.
        """
        self._name, self._timeout = name, timeout
        self._finished: Queue[tuple[Future, Any]] = Queue()
        self._unfinished: dict[Future, Any] = {}
        self._cluster: LocalCluster | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="kvref-search-", ignore_cleanup_errors=True)  # for Dask's files
        interrupts.exit_callbacks.append(self._end_at_once)
        dask.config.set(
            {
                "logging": LOG_LEVELS,
                "temporary-directory": self._folder.name,
                "distributed.comm.timeouts.connect": f"{CONNECT_TIMEOUT}s",
            }
        )
        for logger in LOG_LEVELS:
            logging.getLogger(logger).setLevel(logging.CRITICAL)
        try:
            if address is None:
                with _block_sigint():
                    self._cluster = LocalCluster(
                        n_workers=here, threads_per_worker=1, memory_limit=0, silence_logs=logging.CRITICAL,
                        dashboard_address=ANY_PORT, worker_dashboard_address=ANY_PORT,
                    )  # fmt: skip
            else:
                get_address_host_port(address, strict=True)  # a malformed address raises here, and not after a timeout
            self._client = Client(self._cluster or address, timeout=CONNECT_TIMEOUT, set_as_default=False)
            self._client.wait_for_workers(1, timeout=START_TIMEOUT)
        except (OSError, TimeoutError, ValueError, TypeError) as error:
            self._close_cluster()
            where = "on this machine" if address is None else f"--cluster: {address}"
            raise CannotRun(f"{where}: no workers: {type(error).__name__}: {' '.join(str(error).split())}") from None
        except BaseException:
            self._close_cluster()
            raise
        self.count = self._update_count()
        self._updated_at = time.monotonic()
        self._load()

    def ask(self, about: Any, work: Callable[..., Any], *arguments: Any) -> None:
        """Submit the task work(judge, *arguments). `next` returns `about` with its result."""
        self._submit(about, None, work, *arguments)

    def _submit(self, about: Any, workers: list[str] | None, work: Callable[..., Any], *arguments: Any) -> None:
        """workers: addresses of the workers that may run the task; None means all."""
        task = self._client.submit(run_on_worker, self._name, self._timeout, work, *arguments, workers=workers, pure=False)
        self._unfinished[task] = about
        task.add_done_callback(lambda done: self._finished.put((done, about)))

    @property
    def idle(self) -> int:
        """The number of workers without a task."""
        if time.monotonic() - self._updated_at > QUERY_TIMEOUT:
            self.count, self._updated_at = self._update_count(), time.monotonic()
        return max(0, self.count - self.under_way)

    @property
    def under_way(self) -> int:
        """The number of submitted tasks whose results `next` has not returned yet."""
        return len(self._unfinished)

    def next(self, seconds: float) -> tuple[Any, Any] | None:
        """Wait for the next finished task. Returns its `about`, and its result or exception; None if none finishes in time.

        Raises CannotRun if the scheduler has ended; KeyboardInterrupt.
        """
        with interrupts.allow_interrupts():
            try:
                task, about = self._finished.get(timeout=seconds)
            except Empty:
                if self._client.status != "running":
                    raise CannotRun("the scheduler has ended") from None
                return None
        del self._unfinished[task]
        if task.status == "finished":
            return about, task.result()
        if task.status == "cancelled":
            return about, WorkersLost("cancelled")
        error = task.exception()
        return about, WorkersLost(str(error)) if isinstance(error, KilledWorker) else error

    def _load(self) -> None:
        """Make each worker load the implementation, before the time of the search starts.

        Raises CannotRun, and errors of a worker, for example if it lacks a module.
        """
        try:
            for address in self._client.nthreads():
                self._submit(address, [address], import_slow_modules)
            while self._unfinished:
                _, came = self.next(QUERY_TIMEOUT) or ("", None)
                if isinstance(came, WorkersLost):
                    raise CannotRun(f"{self._name}: a worker ended while loading it: {came}")
                if isinstance(came, Exception):
                    raise came
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancel all tasks, and end the workers of this machine."""
        self._client.cancel(list(self._unfinished), force=True)
        self._client.close(timeout=2)
        self._close_cluster()

    def _close_cluster(self) -> None:
        if self._cluster is not None:
            self._cluster.close(timeout=5)
        interrupts.exit_callbacks.remove(self._end_at_once)
        self._folder.cleanup()

    def _end_at_once(self) -> None:
        """Kill the workers of this machine, and remove their files."""
        for worker in multiprocessing.active_children():
            worker.kill()
            worker.join()
        self._folder.cleanup()

    def _update_count(self) -> int:
        return sum(self._client.nthreads().values())


@contextmanager
def _block_sigint() -> Iterator[None]:
    """Block SIGINT in threads that start inside the block, and in the processes that they start.

    A terminal sends Ctrl-C to all processes at once. Workers must end in good order, without tracebacks. In this process, Ctrl-C
    is deferred until the end of the block.
    """
    resource_tracker.ensure_running()  # if it started inside the block, it would unblock SIGINT
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
