"""The first contact with a server, before anything is judged: its model, how it is told a prompt, and how long one may be."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvref.canary import BOS, FIRST_WORD, Canary, Oracle
from kvref_conformance.canary import words
from kvref_conformance.outcome import CannotRun, NotOffered
from kvref_conformance.server.asking import Asker, Way
from kvref_conformance.server.client import Client, one_line
from kvref_conformance.server.errors import ServerError

# Every one in which the tokens of a prompt may arrive as they are, the plainest first.
WAYS = (
    Way(ids=True), Way(ids=True, adds_bos=True), Way(adds_bos=True), Way(), Way(chat=True, adds_bos=True), Way(chat=True)
)  # fmt: skip
SAYS = 12  # tokens behind a plain prompt
END = 8  # tokens before the end of the context, where it is looked how far a server goes
LISTED = 8  # models in a message
NO_ANSWER, REFUSED, TOKENS, SAID = range(4)  # how far a way got


async def contact(client: Client, canary: Canary, model: str | None) -> Asker:
    """Somebody who asks in the way that works. Raises CannotRun where none does, with what came of the one that got furthest.

    Where none came to an answer, with what came of each.
    """
    model, listed = await _model(client, model)
    tried = list[tuple[int, str]]()
    for way in WAYS:
        asker = Asker(client, canary, model, way)
        reason = await _wrong(asker)
        if reason is None:
            return asker
        tried.append(reason)
        if reason[0] == NO_ANSWER:
            break
    furthest = max(far for far, _ in tried)
    why = next(why for far, why in tried if far == furthest)
    if furthest <= REFUSED:
        ways: dict[str, Way] = {}
        for way, (_, each) in zip(WAYS, tried, strict=False):
            ways.setdefault(each, way)
        why = "; ".join(f"told by {way}: {each}" for each, way in ways.items()) if len(ways) > 1 else why
    if furthest == REFUSED:
        why += f"; is there an interface like OpenAI's at {client.url}? (the URL ends in /v1 as a rule)"
    others = f"; it lists the models {_shown(listed)}" if len(listed) > 1 else ""
    raise CannotRun(f"{client.url}: {why}{others}")


async def room(asker: Asker) -> int:
    """The tokens of a prompt and what is said behind it, as many as the server takes: at most the context of the canary.

    Raises CannotRun where it refuses so long a prompt.
    """
    canary = asker.canary
    length = canary.context - END
    prompt = [BOS, *(FIRST_WORD + np.arange(length - 1) % canary.words).tolist()]
    try:
        answer = await asker.ask(prompt, END)
        said = len(words.tokens(canary, "".join(answer.texts[:1])))
    except ServerError as error:
        if not 400 <= error.status < 500:
            return canary.context  # which the judge will see
        hint = f"start it with a context of {canary.context}, or make a canary with a shorter one (--context)"
        raise CannotRun(f"{asker.client.url}: it refuses a prompt of {length} tokens: {error}; {hint}") from None
    except words.NotWords:
        return canary.context
    return length + said if said < END and answer.ends[0] == "length" else canary.context


async def _model(client: Client, model: str | None) -> tuple[str | None, list[str]]:
    """The model to ask for, None where the server tells of none, and all that it lists. Raises CannotRun."""
    try:
        said = await client.get("/models")
    except ServerError as error:
        if error.kind in ("no connection", "no answer"):
            raise CannotRun(f"{client.url}: {error}") from None
        return model, []
    listed = _ids(said)
    if model is None and len(listed) > 1:
        raise CannotRun(f"--model: expected one of {_shown(listed)}, which the server lists")
    return (listed[0] if model is None and listed else model), listed


def _ids(document: Any) -> list[str]:
    models = document.get("data") if isinstance(document, dict) else None
    ids = [each.get("id") for each in models if isinstance(each, dict)] if isinstance(models, list) else []
    return [each for each in ids if isinstance(each, str) and each.isprintable()]


def _shown(names: Sequence[str]) -> str:
    return ", ".join([*map(one_line, names[:LISTED]), *(["..."] if names[LISTED:] else [])])


async def _wrong(asker: Asker) -> tuple[int, str] | None:
    """How far a way got and why no further, or None where each prompt arrives as it is and what has to come comes."""
    for prompt, count in _prompts(asker.canary):
        must = _continued(asker.canary, prompt, count)
        try:
            answer = await asker.ask(prompt, len(must))
        except NotOffered as missing:
            return REFUSED, str(missing)
        except ServerError as error:
            return (NO_ANSWER if error.kind in ("no connection", "no answer") else REFUSED), str(error)
        told = answer.prompt_tokens
        if told is not None and told != len(prompt):
            why = "its tokenizer is not this canary's, or it adds others"
            return TOKENS, f"told {len(prompt)} tokens as {asker.way}, it counts {told}: {why}"
        try:
            said = asker.tokens(answer, 0, len(must))
        except ServerError as error:
            return SAID, f"its model is not this canary, or its tokenizer merges words: told by {asker.way}, it says {error}"
        if said != must:
            right, wrong = (words.text(asker.canary, each[:3]) for each in (must, said))
            return SAID, (
                f"its model is not this canary, or reads wrongly where nothing is hard: told by {asker.way}, it says "
                f"'{wrong} ...', expected '{right} ...'"
            )
    return None


def _prompts(canary: Canary) -> list[tuple[list[int], int]]:
    """A plain prompt, and shorter ones whose continuation shows whether the first token is there once; and what is asked for."""
    length = min(40 if canary.recalls else canary.period + 5, canary.context - 2, canary.words)
    rng = np.random.default_rng()  # others each time: what lies in its cache since the last time is for the judge to find

    def prompt(count: int) -> list[int]:
        return [BOS, *(FIRST_WORD + rng.permutation(canary.words)[: count - 1]).tolist()]

    plain = prompt(length + 1)
    plain += plain[2:3] if canary.recalls else []
    shorter = [prompt(count) for count in (2, canary.period - 1, canary.period) if 1 < count < length]
    return [(plain, SAYS), *((each, 1) for each in shorter if _continued(canary, each, 1))]


def _continued(canary: Canary, prompt: Sequence[int], count: int) -> list[int]:
    """As much of what comes next as is certain, `count` tokens at most."""
    oracle = Oracle(canary)
    says, said = oracle.extend(prompt)[-1], list[int]()
    while says is not None and len(said) < min(count, canary.context - len(prompt)):
        said.append(says)
        says = oracle.extend([says])[-1]
    return said
