"""An event loop in a thread of its own, so that an alarm or Ctrl-C, which come to the main thread, cut no request in two."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from typing import Any, TypeVar

from kvref_conformance.server.errors import ServerError

T = TypeVar("T")
TELL = 0.25  # seconds between two words of how far it has come
STOPPING = 1.0  # seconds for work that is cut short to leave in good order


class Background:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], tell: Callable[[], None] = lambda: None) -> T:
        """What it returns, or raises. Where the wait is cut short so is the work. tell: called now and then meanwhile."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while not wait([future], TELL).done:
                tell()
            return future.result()
        except ServerError as error:
            raise error.with_traceback(None) from None  # the line of code that it came through says nothing of the server
        except BaseException:
            future.cancel()
            wait([future], STOPPING)
            raise

    @property
    def closed(self) -> bool:
        return self._loop.is_closed()

    def close(self) -> None:
        """To be called once; what still runs is left where it is."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
