"""An event loop in its own thread. An alarm or Ctrl-C interrupts the main thread and thus breaks no request."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from typing import Any, TypeVar

from kvref_canary.server.errors import ServerError

T = TypeVar("T")
REPORT_INTERVAL = 0.25  # seconds between two reports of progress
STOP_TIMEOUT = 1.0  # seconds for cancelled work to clean up


class EventLoopThread:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], tell: Callable[[], None] = lambda: None) -> T:
        """Run `work` to its end, with its result or error. An interrupt cancels it. tell: called every REPORT_INTERVAL s."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not wait([future], REPORT_INTERVAL).done:
                tell()
            return future.result()
        except ServerError as error:
            raise error.with_traceback(None) from None  # our own code line is no information about the server
        except BaseException:
            future.cancel()
            wait([future], STOP_TIMEOUT)
            raise

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def close(self) -> None:
        """Stop the loop. Call it once; work that still runs is abandoned."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
