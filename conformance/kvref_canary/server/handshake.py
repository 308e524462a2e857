"""The first contact with a server, before any check: its model, the request format that works, and the context length."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvref.canary import BOS, FIRST_WORD
from kvref.canary.hybrid import AnyCanary, HybridCanary, continued_text, new_oracle
from kvref_canary.files import vocabulary
from kvref_canary.server.client import HttpClient, one_line
from kvref_canary.server.completions import CompletionClient, PromptEncoding
from kvref_canary.server.errors import NOT_CONNECTED, ServerError
from kvref_conformance.exceptions import CannotRun, NotOffered

# Every request format that can deliver the tokens of a prompt unchanged, the simplest first.
ENCODINGS = (
    PromptEncoding(ids=True), PromptEncoding(ids=True, adds_bos=True), PromptEncoding(adds_bos=True), PromptEncoding(),
    PromptEncoding(chat=True, adds_bos=True), PromptEncoding(chat=True)
)  # fmt: skip
ANSWER_TOKENS = 12  # tokens to generate after a plain prompt
LAST_TOKENS = 8  # tokens generated at the end of the context, to find the length that a server serves
MAX_LISTED = 8  # models in a message
NO_ANSWER, REFUSED_REQUEST, WRONG_COUNT, WRONG_WORDS = range(4)  # the stage at which a request format failed


async def connect(client: HttpClient, canary: AnyCanary, model: str | None) -> CompletionClient:
    """Return a CompletionClient with the request format that works. If none does, raises CannotRun with the best one's error.

    If no format got an answer, the message contains the error of each.
    """
    model, listed = await _select_model(client, model)
    tried = list[tuple[int, str]]()
    for encoding in ENCODINGS:
        asker = CompletionClient(client, canary, model, encoding)
        reason = await _failed_stage(asker)
        if reason is None:
            await _show_special_tokens(asker)
            return asker
        tried.append(reason)
        if reason[0] == NO_ANSWER:
            break
    furthest = max(far for far, _ in tried)
    why = next(why for far, why in tried if far == furthest)
    if furthest <= REFUSED_REQUEST:
        ways: dict[str, PromptEncoding] = {}
        for encoding, (_, each) in zip(ENCODINGS, tried, strict=False):
            ways.setdefault(each, encoding)
        why = "; ".join(f"prompt as {encoding}: {each}" for each, encoding in ways.items()) if len(ways) > 1 else why
    if furthest == REFUSED_REQUEST:
        why += f"; expected an OpenAI-compatible API at {client.url} (the URL usually ends in /v1)"
    others = f"; the server lists the models {_format_names(listed)}" if len(listed) > 1 else ""
    raise CannotRun(f"{client.url}: {why}{others}")


async def _show_special_tokens(asker: CompletionClient) -> None:
    """Ask for the text of special tokens, if the server accepts that. Otherwise a wrong special token shortens the answer."""
    prompt, count = _test_prompts(asker.canary)[0]
    expected = _expected_continuation(asker.canary, prompt, count)
    asker.shows_special_tokens = True
    try:
        asker.shows_special_tokens = await asker.generate(prompt, len(expected)) == expected
    except ServerError:
        asker.shows_special_tokens = False


async def find_context_length(asker: CompletionClient) -> int:
    """Return how many tokens the server accepts, prompt and answer together: at most the context of the canary.

    Raises CannotRun if the server rejects a prompt of that length.
    """
    canary = asker.canary
    length = canary.context - LAST_TOKENS
    prompt = [BOS, *(FIRST_WORD + np.arange(length - 1) % canary.words).tolist()]
    try:
        answer = await asker.complete(prompt, LAST_TOKENS)
        said = len(vocabulary.to_tokens(canary, "".join(answer.texts[:1])))
    except ServerError as error:
        if not 400 <= error.status < 500:
            return canary.context  # the checks will show it
        hint = f"start the server with a context of {canary.context}"
        hint += "" if isinstance(canary, HybridCanary) else ", or make a canary with a shorter one (--context)"
        raise CannotRun(f"{asker.client.url}: the server rejects a prompt of {length} tokens: {error}; {hint}") from None
    except vocabulary.NotCanaryWords:
        return canary.context
    return length + said if said < LAST_TOKENS and answer.ends[0] == "length" else canary.context


async def _select_model(client: HttpClient, model: str | None) -> tuple[str | None, list[str]]:
    """Return the model to request, None if the server lists none, and all listed models. Raises CannotRun."""
    try:
        said = await client.get("/models")
    except ServerError as error:
        if error.kind in ("no connection", NOT_CONNECTED, "no answer"):
            raise CannotRun(f"{client.url}: {error}") from None
        return model, []
    listed = _model_ids(said)
    if model is None and len(listed) > 1:
        raise CannotRun(f"--model: expected one of {_format_names(listed)}, which the server lists")
    return (listed[0] if model is None and listed else model), listed


def _model_ids(document: Any) -> list[str]:
    models = document.get("data") if isinstance(document, dict) else None
    ids = [each.get("id") for each in models if isinstance(each, dict)] if isinstance(models, list) else []
    return [each for each in ids if isinstance(each, str) and each.isprintable()]


def _format_names(names: Sequence[str]) -> str:
    return ", ".join([*map(one_line, names[:MAX_LISTED]), *(["..."] if names[MAX_LISTED:] else [])])


async def _failed_stage(asker: CompletionClient) -> tuple[int, str] | None:
    """Return the stage at which a request format failed and why, or None if all prompts get the expected answers."""
    for prompt, count in _test_prompts(asker.canary):
        must = _expected_continuation(asker.canary, prompt, count)
        try:
            answer = await asker.complete(prompt, len(must))
        except NotOffered as missing:
            return REFUSED_REQUEST, str(missing)
        except ServerError as error:
            return (NO_ANSWER if error.kind in ("no connection", NOT_CONNECTED, "no answer") else REFUSED_REQUEST), str(error)
        told = answer.prompt_tokens
        if told is not None and told != len(prompt):
            why = "its tokenizer is not this canary's, or it adds tokens"
            return WRONG_COUNT, f"the server counts {told} tokens in a prompt of {len(prompt)}, sent as {asker.encoding}: {why}"
        try:
            said = asker.tokens(answer, 0, len(must))
        except ServerError as error:
            return (
                WRONG_WORDS,
                f"the model is not this canary, or its tokenizer merges words: prompt as {asker.encoding}: {error}",
            )
        if said != must:
            right, wrong = (vocabulary.to_text(asker.canary, each[:3]) for each in (must, said))
            return WRONG_WORDS, (
                f"the model is not this canary, or it reads wrong entries even for one short prompt: prompt as {asker.encoding}: "
                f"expected '{right} ...', got '{wrong} ...'"
            )
    return None


def _test_prompts(canary: AnyCanary) -> list[tuple[list[int], int]]:
    """Return prompts with answer lengths: a plain one, and short ones that show whether the first token arrives exactly once.

    A hybrid canary gets a plain one only: it predicts the same without the first token.
    """
    if isinstance(canary, HybridCanary):
        seed = int(np.random.default_rng().integers(2**32))
        return [([BOS, *continued_text(canary.architecture, seed, canary.period + 5)], ANSWER_TOKENS)]
    length = min(40 if canary.recalls else canary.period + 5, canary.context - 2, canary.words)
    rng = np.random.default_rng()  # unseeded: stale cache contents are for the checks to find

    def prompt(count: int) -> list[int]:
        return [BOS, *(FIRST_WORD + rng.permutation(canary.words)[: count - 1]).tolist()]

    plain = prompt(length + 1)
    plain += plain[2:3] if canary.recalls else []
    shorter = [prompt(count) for count in (2, canary.period - 1, canary.period) if 1 < count < length]
    return [(plain, ANSWER_TOKENS), *((each, 1) for each in shorter if _expected_continuation(canary, each, 1))]


def _expected_continuation(canary: AnyCanary, prompt: Sequence[int], count: int) -> list[int]:
    """Return the certain part of the expected continuation, at most `count` tokens."""
    oracle = new_oracle(canary)
    says, said = oracle.extend(prompt)[-1], list[int]()
    while says is not None and len(said) < min(count, canary.context - len(prompt)):
        said.append(says)
        says = oracle.extend([says])[-1]
    return said
