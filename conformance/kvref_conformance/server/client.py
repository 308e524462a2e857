"""HTTP to one server: it talks to no other host, follows no redirect, takes no proxy from the environment, and waits for nothing
for ever. Whatever else comes is a ServerError of one line.
"""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import httpx

from kvref_conformance.server.errors import ServerError
from kvref_conformance.server.events import data_lines

CONNECTING = 5.0  # seconds
IDLE = 1.0  # seconds that a connection is kept for the next request: less than servers keep it, or they close it under one
TRIES = 4  # of a request that the server has no room for at the moment
PAUSE = 0.5  # seconds before another, unless the server says how many
LONGEST_PAUSE = 5.0
DONE = object()  # the end of a stream, where a server says so
SMALL = 2**20  # bytes of a reply that is no completion
SHOWN = 160  # characters of what a server says


class Client:
    """silence: seconds without a byte after which a server counts as hung. Belongs to one event loop."""

    def __init__(self, url: str, silence: float) -> None:
        self.url, self.silence = url, silence
        self._http = httpx.AsyncClient(
            headers={"Accept-Encoding": "identity"},  # a small reply may be a large one
            timeout=httpx.Timeout(silence, connect=CONNECTING, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE),
            verify=url.startswith("https:"),  # where there is nothing to verify, no certificates are read
            follow_redirects=False,
            trust_env=False,
        )
        self.calls_itself = "unknown version"

    async def close(self) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> Any:
        """The JSON document at a path. Raises ServerError."""
        async with self._answered("GET", path, None) as response:
            return _document(b"".join([part async for part in _bounded(response, SMALL)]))

    async def post(self, path: str, body: dict[str, Any], most: int) -> Any:
        """The JSON document that comes, of so many bytes at most. Raises ServerError."""
        async with self._answered("POST", path, body) as response:
            return _document(b"".join([part async for part in _bounded(response, most)]))

    async def stream(self, path: str, body: dict[str, Any], most: int) -> AsyncGenerator[Any]:
        """The JSON documents of a stream of events up to DONE, or to the end. Raises ServerError."""
        async with (
            self._answered("POST", path, body) as response,
            aclosing(_bounded(response, most)) as parts,
            aclosing(data_lines(parts)) as lines,
        ):
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                start = b"".join([part async for part in parts])[:SHOWN].decode(errors="replace")
                raise ServerError(f"no stream of events: {one_line(start)}", "no stream")
            async for line in lines:
                if line == b"[DONE]":
                    yield DONE
                    return
                yield _document(line)

    @asynccontextmanager
    async def _answered(self, method: str, path: str, body: Any) -> AsyncIterator[httpx.Response]:
        """A response of status 200. One that says that there is no room now is waited for, a few times.

        So is a connection that breaks off before anything came: a server with a short queue does that to many at once.
        """
        begun = False
        try:
            for tried in range(TRIES):
                try:
                    async with self._http.stream(method, self.url + path, json=body) as response:
                        begun = True
                        self.calls_itself = one_line(response.headers.get("server", "")) or self.calls_itself
                        if response.status_code == 200:
                            yield response
                            return
                        error = await _error(response)
                except (httpx.ReadError, httpx.RemoteProtocolError):
                    if begun or tried == TRIES - 1:
                        raise
                    await asyncio.sleep(PAUSE)
                    continue
                if response.status_code != 429 or tried == TRIES - 1:
                    raise error
                begun = False
                await asyncio.sleep(_pause(response.headers.get("retry-after", "")))
        except httpx.TimeoutException as error:
            where = "to a connection" if isinstance(error, httpx.ConnectTimeout) else "for a while, so that it counts as hung"
            raise ServerError(f"no answer {where}: {type(error).__name__}", "no answer") from None
        except httpx.ConnectError as error:
            raise ServerError(f"no connection: {one_line(str(error))}", "no connection") from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, UnicodeError) as error:
            raise ServerError(f"the connection broke off: {one_line(str(error)) or type(error).__name__}", "broken off") from None


def one_line(text: str) -> str:
    """The beginning of what a server says, as it can be shown."""
    line = " ".join("".join(each if each.isprintable() else " " for each in text[: 4 * SHOWN]).split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."


async def _bounded(response: httpx.Response, most: int) -> AsyncGenerator[bytes]:
    size = 0
    async for part in response.aiter_raw():
        size += len(part)
        if size > most:
            raise ServerError(f"a reply of more than {most:,} bytes", "too large")
        yield part


async def _error(response: httpx.Response) -> ServerError:
    """Of a response that is not 200, with what the server says of it."""
    status = response.status_code
    if 300 <= status < 400:
        where = one_line(response.headers.get("location", "nowhere"))
        return ServerError(f"HTTP {status}: a redirect to {where}, which is not followed", f"HTTP {status}", status)
    said = b""
    async for part in response.aiter_raw():
        said += part
        if len(said) > 4 * SHOWN:
            break
    text = said[: 16 * SHOWN].decode(errors="replace")
    with suppress(ValueError, RecursionError):
        text = _message(json.loads(text)) or text
    return ServerError(f"HTTP {status}: {one_line(text) or one_line(response.reason_phrase)}", f"HTTP {status}", status)


def _message(document: Any) -> str:
    """What an error says in words, where it is one as OpenAI's."""
    error = document.get("error", document) if isinstance(document, dict) else None
    said = error.get("message", error.get("detail")) if isinstance(error, dict) else error
    return said if isinstance(said, str) else ""


def error_in(document: Any) -> str:
    """The message of a document that is an error in the place of a completion, or nothing."""
    return one_line(_message(document) or "error") if isinstance(document, dict) and document.get("error") else ""


def _document(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise ServerError(f"no JSON: {one_line(data[: 4 * SHOWN].decode(errors='replace')) or 'nothing'}", "no JSON") from None


def _pause(said: str) -> float:
    try:
        seconds = float(said)
    except ValueError:
        return PAUSE
    return min(max(seconds, 0.0), LONGEST_PAUSE) if math.isfinite(seconds) else PAUSE
