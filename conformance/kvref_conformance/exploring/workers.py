"""The processes that work, by Dask: of this machine, or of a cluster that somebody has.

Dask is who hands out work, notices that a worker died, starts another, and asks somebody else what it was asked.
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

from kvref_conformance.conversation import interrupts
from kvref_conformance.exploring.run import Lost
from kvref_conformance.exploring.work import at_work, ready
from kvref_conformance.outcome import CannotRun

CONNECTING = 10.0  # seconds until a scheduler has answered
STARTING = 120.0  # seconds until there is a worker
ASKING = 5.0  # seconds between two looks at how many workers there are
ANY_PORT = "127.0.0.1:0"  # Dask always serves a page, which nobody else is to see
QUIET = {"distributed": "critical", "distributed.nanny": "critical", "distributed.worker": "critical", "bokeh": "critical"}


class Workers:
    """Who does the work. `count` is how many there are now."""

    def __init__(self, name: str, timeout: float, here: int, address: str | None) -> None:
        """here: processes on this machine; address: of a scheduler, whose workers work instead. Raises CannotRun."""
        self._name, self._timeout = name, timeout
        self._done: Queue[tuple[Future, Any]] = Queue()
        self._under_way: dict[Future, Any] = {}
        self._cluster: LocalCluster | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="kvref-search-", ignore_cleanup_errors=True)  # of Dask's
        interrupts.at_once.append(self._end_at_once)
        dask.config.set(
            {"logging": QUIET, "temporary-directory": self._folder.name, "distributed.comm.timeouts.connect": f"{CONNECTING}s"}
        )
        for logger in QUIET:
            logging.getLogger(logger).setLevel(logging.CRITICAL)
        try:
            if address is None:
                with _ctrl_c_is_ours():
                    self._cluster = LocalCluster(
                        n_workers=here, threads_per_worker=1, memory_limit=0, silence_logs=logging.CRITICAL,
                        dashboard_address=ANY_PORT, worker_dashboard_address=ANY_PORT,
                    )  # fmt: skip
            else:
                get_address_host_port(address, strict=True)  # who is no address is a mistake of the user's, and no time out
            self._client = Client(self._cluster or address, timeout=CONNECTING, set_as_default=False)
            self._client.wait_for_workers(1, timeout=STARTING)
        except (OSError, TimeoutError, ValueError, TypeError) as error:
            self._close_cluster()
            where = "on this machine" if address is None else f"--cluster: {address}"
            raise CannotRun(f"{where}: no workers: {type(error).__name__}: {' '.join(str(error).split())}") from None
        except BaseException:
            self._close_cluster()
            raise
        self.count = self._counted()
        self._counted_at = time.monotonic()
        self._load()

    def ask(self, about: Any, work: Callable[..., Any], *arguments: Any) -> None:
        """Have work(judge, *arguments) done; `next` says of it what it was about."""
        self._ask(about, None, work, *arguments)

    def _ask(self, about: Any, workers: list[str] | None, work: Callable[..., Any], *arguments: Any) -> None:
        """workers: who may do it; None stands for all."""
        task = self._client.submit(at_work, self._name, self._timeout, work, *arguments, workers=workers, pure=False)
        self._under_way[task] = about
        task.add_done_callback(lambda done: self._done.put((done, about)))

    @property
    def idle(self) -> int:
        """How many tasks more there are workers for."""
        if time.monotonic() - self._counted_at > ASKING:
            self.count, self._counted_at = self._counted(), time.monotonic()
        return max(0, self.count - self.under_way)

    @property
    def under_way(self) -> int:
        """How many tasks nothing came of yet."""
        return len(self._under_way)

    def next(self, seconds: float) -> tuple[Any, Any] | None:
        """What the next task was about that is done, and what came of it: a result, or an exception; None where none is in time.

        Raises CannotRun where there is nobody left to ask, KeyboardInterrupt.
        """
        with interrupts.prompt():
            try:
                task, about = self._done.get(timeout=seconds)
            except Empty:
                if self._client.status != "running":
                    raise CannotRun("the scheduler has gone") from None
                return None
        del self._under_way[task]
        if task.status == "finished":
            return about, task.result()
        if task.status == "cancelled":
            return about, Lost("cancelled")
        error = task.exception()
        return about, Lost(str(error)) if isinstance(error, KilledWorker) else error

    def _load(self) -> None:
        """Have every worker load the implementation, before time counts. Raises CannotRun, and what a worker may lack."""
        try:
            for address in self._client.nthreads():
                self._ask(address, [address], ready)
            while self._under_way:
                _, came = self.next(ASKING) or ("", None)
                if isinstance(came, Lost):
                    raise CannotRun(f"{self._name}: a worker ended as it was to load it: {came}")
                if isinstance(came, Exception):
                    raise came
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End what is under way, and the workers of this machine."""
        self._client.cancel(list(self._under_way), force=True)
        self._client.close(timeout=2)
        self._close_cluster()

    def _close_cluster(self) -> None:
        if self._cluster is not None:
            self._cluster.close(timeout=5)
        interrupts.at_once.remove(self._end_at_once)
        self._folder.cleanup()

    def _end_at_once(self) -> None:
        """End the workers of this machine, without ceremony, and remove what they wrote."""
        for worker in multiprocessing.active_children():
            worker.kill()
            worker.join()
        self._folder.cleanup()

    def _counted(self) -> int:
        return sum(self._client.nthreads().values())


@contextmanager
def _ctrl_c_is_ours() -> Iterator[None]:
    """Threads that begin inside the block, and the processes that they start from then on, are not told of Ctrl-C.

    A terminal tells all of them at once, and workers are to end in good order, not with a traceback each. Here it waits.
    """
    resource_tracker.ensure_running()  # which would let Ctrl-C through again, where it starts inside the block
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
