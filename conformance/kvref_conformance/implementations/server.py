"""A server as an implementation: an engine that accepts whole prompts."""

import asyncio
import itertools
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvref.canary import Canary
from kvref.canary.hybrid import AnyCanary, engine_canary
from kvref.errors import OutOfBlocks, PositionOutOfRange, in_range
from kvref_canary.files import huggingface
from kvref_canary.server.dimensions import sizes_of, with_shorter_context
from kvref_canary.server.errors import NOT_CONNECTED, ServerError
from kvref_canary.server.event_loop_thread import EventLoopThread
from kvref_canary.server.url import Address
from kvref_conformance.exceptions import CannotRun, NotOffered
from kvref_conformance.families.engine.stateless_adapter import WholePrompts
from kvref_conformance.implementation_api import ExternalImplementation, Level

if TYPE_CHECKING:
    from kvref_canary.server.completions import CompletionClient

T = TypeVar("T")
SILENCE_TIMEOUT = 600.0  # seconds without a byte; the judge's limit per call is usually shorter


class ServerImplementation(ExternalImplementation):
    """limits: the sizes of the loaded canary, and the context that the server accepts. The constructor contacts the server."""

    level: Level = "exact"
    formats = ("float32",)

    def __init__(self, address: Address, silence: float = SILENCE_TIMEOUT) -> None:
        """Raises CannotRun."""
        canary = huggingface.load(address.folder)
        numbers = sizes_of(canary)
        self.background = EventLoopThread()
        try:
            self.asker, context = self.background.run(_connect(address, canary, silence))
            self.canary = self.asker.canary
        except BaseException:
            self.background.close()
            raise
        self.limits = {"engine": {**numbers, "context": context}}
        self.name = self.asker.reply_model or address.url
        self.version = self.asker.client.calls_itself
        self.language = f"{self.asker.encoding} over HTTP"

    def asarray(self, values: Any) -> Any:
        return values

    def to_numpy(self, array: Any) -> Any:
        return array

    def engine(self, cache_tokens: int, **sizes: int) -> "ServerSessions":
        """Return an engine; the server's cache size is fixed, `cache_tokens` is ignored. Raises ConfigError for invalid sizes."""
        if not isinstance(cache_tokens, int) or cache_tokens < 1:
            raise NotOffered("validation of cache_tokens: the size of the server's cache is fixed")
        engine_canary(**sizes)
        return self.sessions()

    def sessions(self) -> "ServerSessions":
        """Return an engine with the loaded canary."""
        return ServerSessions(self.canary, self.asker, self.background)

    def close(self) -> None:
        if not self.background.closed:
            self.background.run(self.asker.client.close())
            self.background.close()


class ServerSessions(WholePrompts):
    """Every other step requests many tokens at once, so that concurrent requests are long; steps return them one by one."""

    def __init__(self, canary: AnyCanary, asker: "CompletionClient", background: EventLoopThread) -> None:
        super().__init__(canary)
        self._asker, self._background = asker, background
        self._requests = itertools.count()
        self._ahead: dict[int, tuple[int, list[int]]] = {}  # by session: its length, and the tokens after it

    def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Complete all prompts concurrently, every other one in a stream."""
        asked = (self._asker.generate(prompt, count, next(self._requests) % 2 == 1) for prompt in prompts)
        try:
            return self._run(_gather_results(asked))
        except ServerError as error:
            if error.no_room:
                raise OutOfBlocks(str(error)) from None
            raise

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of requests. Raises NotOffered if the server, which can be busy, accepts no connection in time."""
        try:
            return self._background.run(coroutine)
        except ServerError as error:
            if error.kind == NOT_CONNECTED:
                raise NotOffered(f"a reply of the server: {error}") from None
            raise

    def step(self, sessions: Sequence[int]) -> list[int]:
        told = [self._session_tokens(session, generates=True) for session in sessions]
        for tokens in told:
            self._check_room(tokens, 1)
        known = [self._ahead.get(session, (0, [])) for session in sessions]
        if any(length != len(tokens) or not said for (length, said), tokens in zip(known, told, strict=True)):
            room = min((self.canary.context - len(tokens) for tokens in told), default=0)
            count = min(self.canary.period, room) if next(self._requests) % 2 else 1
            answers = self.complete(told, count) if told else []
        else:
            answers = [said for _, said in known]
        for session, tokens, (token, *rest) in zip(sessions, told, answers, strict=True):
            tokens.append(token)
            self._ahead[session] = len(tokens), rest
        return [tokens[-1] for tokens in told]

    def sample(self, session: int, n: int, count: int) -> list[int]:
        """Return the tokens of n answers to one request, concatenated in order."""
        told = self._session_tokens(session, generates=True)
        n, count = in_range(n, None, PositionOutOfRange, "n"), in_range(count, None, PositionOutOfRange, "count")
        if not n or not count:
            return []
        self._check_room(told, count)
        answer = self._run(self._asker.generate_several(told, n, count))
        return [token for choice in range(n) for token in self._asker.tokens(answer, choice, count)]

    def cancel(self, session: int, count: int) -> None:
        """Close the connection in the middle of a stream of `count` tokens."""
        told = self._session_tokens(session, generates=True)
        if in_range(count, None, PositionOutOfRange, "count"):
            self._check_room(told, count)
            self._run(self._asker.cancel_midway(told, count))


async def _connect(address: Address, canary: AnyCanary, silence: float) -> "tuple[CompletionClient, int]":
    """Return a CompletionClient for the server and its canary, and the context length. Raises CannotRun."""
    try:
        from kvref_canary.server.client import HttpClient
        from kvref_canary.server.handshake import connect, find_context_length
    except ModuleNotFoundError as error:
        raise CannotRun(f"--server needs {error.name} (in a clone: pip install '.[conformance]')") from None
    client = HttpClient(address.url, silence)
    try:
        asker = await connect(client, canary, address.model)
        context = await find_context_length(asker)
        shorter = with_shorter_context(canary, context) if isinstance(canary, Canary) else replace(canary, context=context)
        if shorter is None:
            raise CannotRun(
                f"{address.url}: the server stops after {context} tokens, and the context of the canary is {canary.context}: "
                "start the server with a longer context, or make a canary with a shorter one (--context)"
            )
        asker.canary = shorter
    except BaseException:
        await client.close()
        raise
    return asker, context


async def _gather_results(asked: Iterable[Coroutine[Any, Any, list[int]]]) -> list[list[int]]:
    """Return all results. If some raised, raises the first error after all are done."""
    told = list[list[int]]()
    for said in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(said, BaseException):
            raise said
        told.append(said)
    return told
