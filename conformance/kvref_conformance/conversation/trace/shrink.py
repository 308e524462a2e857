"""The shortest conversation that still breaks the clause: calls are left out, tokens taken away, numbers made whole.

Within reason: what was found at real sizes takes a second to hold, and is made as small as it can be in SECONDS.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.conversation.exchange import Exchange, On, Request, Summary, needs, resolved
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.conversation.trace.dialogue import Dialogue
from kvref_conformance.conversation.trace.within import within_limits
from kvref_conformance.families import all_families
from kvref_conformance.oracle.witness import Unknown
from kvref_conformance.outcome import Broken, NotOffered

SECONDS = 30.0  # to make one conversation shorter
EACH = 16  # tokens up to which every number of them is tried; beyond, powers of two and their neighbours
WHOLE = 4096  # numbers that are made whole: more of them nobody reads


class Held(NamedTuple):
    """What came of holding requests. broken: what the last exchange broke; at: the last of the requests that was made.

    missing: what was left out, because it is not offered.
    """

    conversation: list[Exchange]
    broken: Broken | None = None
    at: int | None = None
    missing: Sequence[str] = ()


Holding = Callable[[list[Request]], Held]  # from a fresh start with the implementation


def hold(subject: Subject, requests: list[Request], seconds: float = float("inf")) -> Held:
    """Hold a conversation: the exchanges, and what broke at the last of them. Raises Unknown where no model speaks.

    seconds: after which it is left where it is.
    """
    subject.family = subject.family or next((request.family for request in requests), "")  # whose limits count
    dialogue, until = Dialogue(subject), time.monotonic() + seconds
    numbers: dict[int, int] = {}  # the requests' own ids are kept apart from those of this conversation
    results: dict[int, Any] = {}
    made, missing = None, list[str]()
    for at, request in enumerate(requests):
        if time.monotonic() > until:
            break
        try:
            args = {name: renumbered(value, numbers, results) for name, value in request.args.items()}
            on = None if request.on is None else numbers[request.on]
        except KeyError:
            continue  # what it refers to was never made
        try:
            within_limits(subject, request, args)
            result = dialogue.say(request.op, on, args)
        except NotOffered as lacking:
            missing.append(str(lacking))
            continue
        except Broken as broken:
            return Held(subject.conversation, broken, at, missing)
        made = at
        if result is not None:
            numbers[request.id], results[request.id] = subject.conversation[-1].request.id, result
    return Held(subject.conversation, None, made, missing)


def place_of_last(conversation: list[Exchange], requests: list[Request]) -> int:
    """Which of the requests that were to be made the last exchange is, where some were left out."""
    at = -1
    for exchange in conversation:
        at = next((index for index in range(at + 1, len(requests)) if requests[index].op == exchange.request.op), at)
    return at


def renumbered(value: Any, numbers: dict[int, int], results: dict[int, Any]) -> Any:
    """An argument for another conversation. Raises KeyError where it has not what the argument refers to."""
    return On(numbers[value.id]) if isinstance(value, On) else resolved(value, results)


def shrink(conversation: list[Exchange], clause: str, holding: Holding) -> tuple[list[Exchange], Broken] | None:
    """The smallest conversation found that breaks `clause`, or None where holding it again does not.

    A check may call by another clause what a model finds in the same reply: then that clause is kept to.
    """
    best: tuple[list[Exchange], Broken] | None = None
    until = time.monotonic() + SECONDS
    if any(isinstance(value, Summary) for exchange in conversation for value in exchange.request.args.values()):
        return None

    def attempt(requests: list[Request]) -> bool:
        nonlocal best
        if time.monotonic() > until:
            return False
        try:
            held, broken, *_ = holding(requests)
        except Unknown:
            return False
        if broken is None:
            return False
        in_the_same_reply = best is None and len(held) == len(conversation)
        if broken.clause not in (clause, best[1].clause if best else clause) and not in_the_same_reply:
            return False
        best = held, broken
        return True

    requests = [exchange.request for exchange in conversation]
    if not attempt(requests):
        return None
    requests = _requests(best)
    size = len(requests)
    while size:
        for start in range(len(requests) - 1 - size, -1, -size):
            shorter = _without(requests, start, start + size)
            if len(shorter) < len(requests) and attempt(shorter):
                requests = shorter
        size //= 2

    def simplified(index: int, simpler: Iterator[Request]) -> bool:
        """Whether one of these in place of a request still breaks the clause: the first of them stays there."""
        for each in simpler:
            if attempt([*requests[:index], each, *requests[index + 1 :]]):
                requests[index] = each
                return True
        return False

    for index in range(len(requests)):
        while simplified(index, _with_half_the_rows(requests[index])):
            pass
        for ways in (_with_one_row, _with_fewer_tokens, _with_whole_numbers):
            simplified(index, ways(requests[index]))
    attempt(requests)
    return best


def _requests(best: tuple[list[Exchange], Broken] | None) -> list[Request]:
    return [exchange.request for exchange in best[0]] if best else []


def _without(requests: list[Request], start: int, stop: int) -> list[Request]:
    """The requests without some, and without those that need what is gone."""
    gone = {request.id for request in requests[start:stop]}
    kept = []
    for request in requests:
        if request.id in gone or needs(request) & gone:
            gone.add(request.id)
        else:
            kept.append(request)
    return kept


def _with_half_the_rows(request: Request) -> Iterator[Request]:
    """The same request of a function that works row by row, for either half of its rows: one in thousands is soon found."""
    count = _rows(request)
    if count > 1:
        yield _of_rows(request, 0, count // 2)
        yield _of_rows(request, count // 2, count)


def _with_one_row(request: Request) -> Iterator[Request]:
    """The same request of such a function for each of its rows alone."""
    count = _rows(request)
    yield from (_of_rows(request, row, row + 1) for row in range(count if count > 1 else 0))


def _rows(request: Request) -> int:
    """How many rows a function is given that works row by row; 0 of any other request."""
    if request.op not in ("rows.quantize", "rows.dequantize", "elements.encode", "elements.decode"):
        return 0
    lengths = {len(array) for array in _arrays(request).values()}
    return lengths.pop() if len(lengths) == 1 else 0


def _of_rows(request: Request, start: int, stop: int) -> Request:
    return replace(request, args=request.args | {name: array[start:stop] for name, array in _arrays(request).items()})


def _with_fewer_tokens(request: Request) -> Iterator[Request]:
    """The same request with one token, with two, and so on; of many, as many as fill a block, a tile, a type."""
    if request.name not in ("append", "append_fused", "write", "extend"):
        return
    family = all_families().get(request.family)  # a buffer is none, and its values have one axis
    axis = family.token_axis if family else -1
    arrays = {name: array for name, array in _arrays(request).items() if array.ndim >= -axis}  # what has too few axes stays
    lengths = {array.shape[axis] for array in arrays.values()}
    if len(lengths) == 1:
        for length in _fewer(lengths.pop()):
            fewer = {name: np.take(array, range(length), axis=axis) for name, array in arrays.items()}
            yield replace(request, args=request.args | fewer)


def _fewer(count: int) -> Iterator[int]:
    """Numbers below another, upwards."""
    yield from range(1, min(count, EACH + 1))
    for power in (2**exponent for exponent in range(5, count.bit_length() + 1)):
        yield from (each for each in (power - 1, power, power + 1) if each < count)


def _with_whole_numbers(request: Request) -> Iterator[Request]:
    """The same request with 1, 2, 3 and so on for numbers, which tell the tokens apart and can be read."""
    first, whole = 1, dict[str, NDArray]()
    if sum(array.size for array in _arrays(request).values()) > WHOLE:
        return
    for name, array in _arrays(request).items():
        if array.dtype == np.float32:
            whole[name] = np.arange(first, first + array.size, dtype=np.float32).reshape(array.shape)
            first += array.size
    if any(not np.array_equal(whole[name], request.args[name]) for name in whole):
        yield replace(request, args=request.args | whole)


def _arrays(request: Request) -> dict[str, NDArray]:
    return {name: value for name, value in request.args.items() if isinstance(value, np.ndarray)}
