"""Completion requests for prompts of tokens, and the tokens of the replies."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvref.canary import BOS
from kvref.canary.hybrid import AnyCanary
from kvref_canary.files import vocabulary
from kvref_canary.server.client import END_OF_STREAM, HttpClient, error_in, one_line
from kvref_canary.server.errors import ServerError
from kvref_conformance.exceptions import NotOffered

MAX_BYTES = 2**18  # maximum bytes of a reply without its tokens
MAX_BYTES_PER_TOKEN = 2**12  # maximum bytes per token: in a stream each token has its own document
WARM_UP_SECONDS = 0.1  # a temperature with the same tokens as 0: the second best logit of a canary is far lower


@dataclass(frozen=True)
class PromptEncoding:
    """The format of a prompt. ids: as token ids. chat: as the message of a user. adds_bos: the server adds the token <s>."""

    ids: bool = False
    chat: bool = False
    adds_bos: bool = False

    def __str__(self) -> str:
        return "chat" if self.chat else "token ids" if self.ids else "text"

    @property
    def path(self) -> str:
        return "/chat/completions" if self.chat else "/completions"

    def encode(self, canary: AnyCanary, prompt: Sequence[int]) -> dict[str, Any]:
        """Return the part of a request that contains the prompt. Raises NotOffered if this format cannot express it."""
        if self.adds_bos:
            if prompt[0] != BOS:
                raise NotOffered("a prompt that does not begin with the token <s>, which the server adds to every prompt")
            prompt = prompt[1:]
        if self.ids:
            return {"prompt": list(prompt)}
        text = vocabulary.to_text(canary, prompt)
        return {"messages": [{"role": "user", "content": text}]} if self.chat else {"prompt": text}


@dataclass
class Completion:
    """A reply. texts, ends: per choice, its text and finish_reason. model: its name on the server.

    prompt_tokens, cached: tokens of the prompt, if reported. first, total: seconds to the first text and to the end.
    """

    texts: list[str] = field(default_factory=list)
    ends: list[str | None] = field(default_factory=list)
    model: str | None = None
    prompt_tokens: int | None = None
    cached: int | None = None
    first: float | None = None
    total: float = 0.0


class CompletionClient:
    """Requests to one model of one server, in one format. reply_model: the model's name in the replies, None before the first."""

    def __init__(self, client: HttpClient, canary: AnyCanary, model: str | None, encoding: PromptEncoding) -> None:
        self.client, self.canary, self.model, self.encoding = client, canary, model, encoding
        self.reply_model: str | None = None
        self.shows_special_tokens = False  # whether the server is asked for the text of special tokens, which servers omit
        self._returns_several = False  # whether the server has returned several answers
        self._warm = False  # whether several answers are requested at WARM: some servers return only one at 0

    async def complete(self, prompt: Sequence[int], count: int, stream: bool = False, n: int = 1) -> Completion:
        """Request `count` greedy tokens, n times. Raises ServerError and NotOffered."""
        body, most = self._request_body(prompt, count, n), MAX_BYTES + MAX_BYTES_PER_TOKEN * count * n
        began = time.monotonic()
        try:
            async with asyncio.timeout(self.client.silence):  # for the whole reply: a server may send single bytes without end
                if stream:
                    answer = await self._read_stream(body, most, began)
                else:
                    answer = parse_completion(await self.client.post(self.encoding.path, body, most))
        except TimeoutError:
            raise ServerError(f"the answer was not complete within {self.client.silence:g} s", "no answer") from None
        answer.total = time.monotonic() - began
        self._expect_the_model(answer.model)
        return answer

    async def generate(self, prompt: Sequence[int], count: int, stream: bool = False) -> list[int]:
        """Return `count` generated tokens. Raises ServerError if the text has other words than the canary's, or another count."""
        return self.tokens(await self.complete(prompt, count, stream), 0, count)

    async def generate_several(self, prompt: Sequence[int], n: int, count: int) -> Completion:
        """Return n answers to one request. Raises NotOffered if the server does not return n."""
        try:
            answer = await self.complete(prompt, count, n=n)
        except ServerError as error:
            if error.status not in (400, 422):
                raise
            if self._warm:
                raise NotOffered(f"several answers to one request: {error}") from None
            self._warm = True
            return await self.generate_several(prompt, n, count)
        if len(answer.texts) != n:
            if self._returns_several:
                raise ServerError(f"expected {n} answers, as to earlier requests, got {len(answer.texts)}", "another count")
            raise NotOffered(f"several answers to one request: {n} requested, {len(answer.texts)} returned")
        self._returns_several |= n > 1  # one answer to a request for one shows nothing
        return answer

    async def cancel_midway(self, prompt: Sequence[int], count: int) -> list[int]:
        """Request a stream of `count` tokens, close it halfway, and return the tokens received. Raises ServerError."""
        heard = list[str]()
        body = self._request_body(prompt, count, 1) | {"stream": True}
        async with aclosing(self.client.stream(self.encoding.path, body, MAX_BYTES + MAX_BYTES_PER_TOKEN * count)) as documents:
            async for document in documents:
                heard += [] if document is END_OF_STREAM else filter(None, parse_completion(document).texts)
                if 2 * len(heard) >= count:
                    break
        with _words_or_error():
            return vocabulary.to_tokens_of_prefix(self.canary, "".join(heard))

    def tokens(self, answer: Completion, choice: int, count: int) -> list[int]:
        """Return the tokens of one choice. Raises ServerError if they are no words of the canary, or not `count`."""
        if not answer.texts:
            raise ServerError("the answer contains no choice", "no completion")
        with _words_or_error():
            said = vocabulary.to_tokens(self.canary, answer.texts[choice])
        if len(said) != count:
            why = one_line(str(answer.ends[choice]))
            raise ServerError(f"expected {count} tokens, got {len(said)}; finish_reason {why}", "another count")
        return said

    def _request_body(self, prompt: Sequence[int], count: int, n: int) -> dict[str, Any]:
        body = self.encoding.encode(self.canary, prompt) | {"max_tokens": count, "temperature": 0}
        body |= {} if self.model is None else {"model": self.model}
        body |= {"skip_special_tokens": False} if self.shows_special_tokens else {}
        return body if n == 1 else body | {"n": n, "temperature": WARM_UP_SECONDS if self._warm else 0}

    async def _read_stream(self, body: dict[str, Any], most: int, began: float) -> Completion:
        """Read a stream to its end."""
        answer, heard, whole = Completion([""], [None]), list[str](), False
        async with aclosing(self.client.stream(self.encoding.path, body | {"stream": True}, most)) as documents:
            async for document in documents:
                if document is END_OF_STREAM:
                    whole = True
                    break
                part = parse_completion(document)
                if any(part.texts) and answer.first is None:
                    answer.first = time.monotonic() - began
                heard += part.texts
                answer.ends = [end for end in part.ends if end is not None] or answer.ends
                answer.model = part.model or answer.model
        if answer.ends[0] is None and not whole:
            raise ServerError("the stream ended without [DONE] and without a finish_reason", "broken off")
        answer.texts = ["".join(heard)]
        return answer

    def _expect_the_model(self, model: str | None) -> None:
        if self.reply_model is None:
            self.reply_model = model
        elif model is not None and model != self.reply_model:
            raise ServerError(f"expected an answer of model {self.reply_model}, got one of {model}", "another model")


@contextmanager
def _words_or_error() -> Iterator[None]:
    try:
        yield
    except vocabulary.NotCanaryWords as error:
        raise ServerError(str(error), "no words") from None


def parse_completion(document: Any) -> Completion:
    """Parse a completion, or a part of one in a stream. Raises ServerError if the document is neither."""
    if said := error_in(document):
        raise ServerError(f"the server returned an error instead of an answer: {said}", "an error")
    try:
        choices = sorted(document["choices"], key=lambda choice: int(choice.get("index", 0)))
        answer = Completion([_text_of(choice) for choice in choices], [choice.get("finish_reason") for choice in choices])
        model, usage = document.get("model"), document.get("usage") or {}
        answer.model = one_line(model) or None if isinstance(model, str) else None
        answer.prompt_tokens = _number_or_none(usage.get("prompt_tokens"))
        answer.cached = _number_or_none((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise ServerError(f"expected a completion, got {one_line(str(document))}", "no completion") from None
    return answer


def _text_of(choice: Any) -> str:
    """Raises TypeError."""
    holder = choice.get("message", choice.get("delta"))
    said = choice["text"] if holder is None else holder.get("content")
    if said is not None and not isinstance(said, str):
        raise TypeError
    return said or ""


def _number_or_none(said: Any) -> int | None:
    return said if type(said) is int and said >= 0 else None
