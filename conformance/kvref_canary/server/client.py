"""HTTP client for one server. It connects to no other host, follows no redirect, uses no proxy of the environment, and limits
every wait. Every other reply or failure is a ServerError with a one-line message.
"""

import asyncio
import json
import math
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import httpx

from kvref_canary.server.errors import NOT_CONNECTED, ServerError
from kvref_canary.server.sse import data_lines

CONNECT_TIMEOUT = 5.0  # seconds
IDLE_TIMEOUT = 1.0  # seconds an idle connection is kept: shorter than servers do, which would otherwise close it under a request
MAX_TRIES = 4  # of a request that the server rejects for lack of room
FIRST_PAUSE = 0.5  # seconds before the next try, unless the server sends Retry-After
MAX_PAUSE = 5.0
END_OF_STREAM = object()  # the end of a stream, if the server marks it
MAX_DOCUMENT_BYTES = 2**20  # maximum bytes of a reply that is no completion
MAX_QUOTED = 160  # characters of a server's message


class HttpClient:
    """silence: seconds without a byte after which a server counts as hung. Use one client in one event loop only."""

    def __init__(self, url: str, silence: float) -> None:
        self.url, self.silence = url, silence
        self._http = httpx.AsyncClient(
            headers={"Accept-Encoding": "identity"},  # a small compressed reply may expand to a large one
            timeout=httpx.Timeout(silence, connect=CONNECT_TIMEOUT, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=IDLE_TIMEOUT),
            verify=url.startswith("https:"),  # do not read certificates for plain HTTP
            follow_redirects=False,
            trust_env=False,
        )
        self.calls_itself = "unknown version"

    async def close(self) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> Any:
        """Return the JSON document at a path. Raises ServerError."""
        async with self._answered("GET", path, None) as response:
            return _parse_document(b"".join([part async for part in _bounded_bytes(response, MAX_DOCUMENT_BYTES)]))

    async def post(self, path: str, body: dict[str, Any], most: int) -> Any:
        """Return the JSON document of the reply, at most `most` bytes. Raises ServerError."""
        async with self._answered("POST", path, body) as response:
            return _parse_document(b"".join([part async for part in _bounded_bytes(response, most)]))

    async def stream(self, path: str, body: dict[str, Any], most: int) -> AsyncGenerator[Any]:
        """Yield the JSON documents of a stream of events, and DONE at its end if it is marked. Raises ServerError."""
        async with (
            self._answered("POST", path, body) as response,
            aclosing(_bounded_bytes(response, most)) as parts,
            aclosing(data_lines(parts)) as lines,
        ):
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                start = b"".join([part async for part in parts])[:MAX_QUOTED].decode(errors="replace")
                raise ServerError(f"expected a stream of events, got {one_line(start)}", "no stream")
            async for line in lines:
                if line == b"[DONE]":
                    yield END_OF_STREAM
                    return
                yield _parse_document(line)

    @asynccontextmanager
    async def _answered(self, method: str, path: str, body: Any) -> AsyncIterator[httpx.Response]:
        """Yield a response of status 200. If the server has no room now, try again a few times.

        Also try again if the connection breaks before any byte arrived: a server with a short queue does this to many at once.
        """
        begun = False
        try:
            for tried in range(MAX_TRIES):
                try:
                    async with self._http.stream(method, self.url + path, json=body) as response:
                        begun = True
                        self.calls_itself = one_line(response.headers.get("server", "")) or self.calls_itself
                        if response.status_code == 200:
                            yield response
                            return
                        error = await _error_of_response(response)
                except (httpx.ReadError, httpx.RemoteProtocolError):
                    if begun or tried == MAX_TRIES - 1:
                        raise
                    await asyncio.sleep(FIRST_PAUSE)
                    continue
                if response.status_code != 429 or tried == MAX_TRIES - 1:
                    raise error
                begun = False
                await asyncio.sleep(_retry_after(response.headers.get("retry-after", "")))
        except httpx.TimeoutException as error:
            if isinstance(error, httpx.ConnectTimeout):
                raise ServerError("no answer to the connection attempt: ConnectTimeout", NOT_CONNECTED) from None
            raise ServerError(f"no answer for {self.silence:g} s: {type(error).__name__}", "no answer") from None
        except httpx.ConnectError as error:
            raise ServerError(f"no connection: {one_line(str(error))}", "no connection") from None
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, UnicodeError) as error:
            raise ServerError(f"the connection was lost: {one_line(str(error)) or type(error).__name__}", "broken off") from None


def one_line(text: str) -> str:
    """Return the beginning of a server's message as one printable line."""
    line = " ".join("".join(each if each.isprintable() else " " for each in text[: 4 * MAX_QUOTED]).split())
    return line if len(line) <= MAX_QUOTED else f"{line[:MAX_QUOTED]}..."


async def _bounded_bytes(response: httpx.Response, most: int) -> AsyncGenerator[bytes]:
    size = 0
    async for part in response.aiter_raw():
        size += len(part)
        if size > most:
            raise ServerError(f"a reply of more than {most:,} bytes", "too large")
        yield part


async def _error_of_response(response: httpx.Response) -> ServerError:
    """Return the error for a response that is not 200, with the server's message."""
    status = response.status_code
    if 300 <= status < 400:
        where = one_line(response.headers.get("location", "nowhere"))
        return ServerError(f"HTTP {status}: a redirect to {where}, which is not followed", f"HTTP {status}", status)
    said = b""
    async for part in response.aiter_raw():
        said += part
        if len(said) > 4 * MAX_QUOTED:
            break
    text = said[: 16 * MAX_QUOTED].decode(errors="replace")
    with suppress(ValueError, RecursionError):
        text = _error_message(json.loads(text)) or text
    return ServerError(f"HTTP {status}: {one_line(text) or one_line(response.reason_phrase)}", f"HTTP {status}", status)


def _error_message(document: Any) -> str:
    """Return the message of an error in OpenAI's format."""
    error = document.get("error", document) if isinstance(document, dict) else None
    said = error.get("message", error.get("detail")) if isinstance(error, dict) else error
    return said if isinstance(said, str) else ""


def error_in(document: Any) -> str:
    """Return the message if the document is an error instead of a completion, else an empty string."""
    return one_line(_error_message(document) or "error") if isinstance(document, dict) and document.get("error") else ""


def _parse_document(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise ServerError(
            f"expected JSON, got {one_line(data[: 4 * MAX_QUOTED].decode(errors='replace')) or 'nothing'}", "no JSON"
        ) from None


def _retry_after(said: str) -> float:
    try:
        seconds = float(said)
    except ValueError:
        return FIRST_PAUSE
    return min(max(seconds, 0.0), MAX_PAUSE) if math.isfinite(seconds) else FIRST_PAUSE
