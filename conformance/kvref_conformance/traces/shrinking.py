"""The shrinker: reduces a failing call trace to a minimal reproducer, and the replay of recorded requests that it uses.

It removes operations and calls, uses fewer sequences, makes sequences shorter, then removes layers, rows and tokens, then
replaces numbers by small integers, as long as the clause still breaks. It stops after MAX_SHRINK_CALLS replayed calls, so that
a busy machine finds the same calls as an idle one. If the implementation is slow, it stops after SHRINK_SECONDS.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kvref_conformance.calls.messages import (
    ArraySummary,
    CallRequest,
    Exchange,
    ObjectReference,
    ReplyReference,
    is_error_text,
    referenced_ids,
    resolve_references,
    result_names,
)
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.families import all_families
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.model_runner import UnknownObject
from kvref_conformance.traces.checked_session import CheckedSession
from kvref_conformance.traces.portability import require_within_limits

MAX_SHRINK_CALLS = 6_000  # replayed calls per call trace: about 15 s on an idle machine
NUMBERS_PER_CALL = 20_000  # as many numbers in arrays take about as long as a call, and count as one
SHRINK_SECONDS = 60.0  # time limit per call trace, for implementations that need more than 10 ms per call
LONG_TRACE = 300  # calls
LONG_REPLAY_SECONDS = 10.0  # time limit per replay of a long call trace: if one takes longer, shrinking would not get far
SMALL_COUNT = 16  # up to this number of tokens, each number is tried; above, powers of two and their neighbors
MAX_TRIED_ROWS = 4096  # requests with more numbers than this are not simplified: their values are not readable anyway


class ReplayResult(NamedTuple):
    """The result of a replay.

    call_trace: the calls that were made. violation: the failure of the last call, if any. last_index: the index of the last
    request that was made. missing: reasons of requests that were left out because they are not offered.
    """

    call_trace: list[Exchange]
    violation: ClauseViolation | None = None
    last_index: int | None = None
    missing: Sequence[str] = ()


ReplayFunction = Callable[[list[CallRequest]], ReplayResult]  # replays requests on new objects of the implementation


def replay_requests(
    subject: Subject,
    requests: list[CallRequest],
    seconds: float = float("inf"),
    observed: Sequence[int] = (),
    observed_after: range = range(0),
) -> ReplayResult:
    """Replay requests and judge each reply, up to the first wrong one. Raises UnknownObject if no model covers a request.

    seconds: the time after which the replay stops. observed: objects, by the ids of the requests, whose observables are read
    after the requests with the indices `observed_after`.
    """
    subject.family = subject.family or next((request.family for request in requests), "")  # the family whose limits apply
    session, until = CheckedSession(subject), time.monotonic() + seconds
    numbers: dict[int, int] = {}  # maps the ids of the recorded requests to the ids of this replay
    results: dict[int, Any] = {}
    made, missing = None, list[str]()
    for at, request in enumerate(requests):
        if time.monotonic() > until:
            break
        try:
            args = {name: renumber_references(value, numbers, results) for name, value in request.args.items()}
            on = None if request.on is None else numbers[request.on]
        except KeyError:
            continue  # it refers to a request that was left out
        try:
            require_within_limits(subject, request, args)
            result = session.call(request.op, on, args)
            if result is not None:
                numbers[request.id], results[request.id] = subject.call_trace[-1].request.id, result
            for number in reversed(observed if at in observed_after else ()):  # buffers before their pool
                if number in numbers:
                    session.observe(numbers[number])
        except NotOffered as lacking:
            missing.append(str(lacking))
            continue
        except ClauseViolation as violation:
            return ReplayResult(subject.call_trace, violation, at, missing)
        made = at
    return ReplayResult(subject.call_trace, None, made, missing)


def index_of_last_request(call_trace: list[Exchange], requests: list[CallRequest]) -> int:
    """The index of the request that the last exchange replays. Some requests may have been left out of the replay."""
    at = -1
    for exchange in call_trace:
        at = next((index for index in range(at + 1, len(requests)) if requests[index].op == exchange.request.op), at)
    return at


def renumber_references(value: Any, numbers: dict[int, int], results: dict[int, Any]) -> Any:
    """An argument with its references changed to those of a replay. Raises KeyError if the replay lacks the referenced result."""
    return ObjectReference(numbers[value.id]) if isinstance(value, ObjectReference) else resolve_references(value, results)


def shrink_trace(
    call_trace: list[Exchange], clause: str, holding: ReplayFunction
) -> tuple[list[Exchange], ClauseViolation] | None:
    """The smallest call trace found that breaks `clause`, with its failure; None if a replay does not fail.

    clause: "" stands for any clause. The model may blame another clause than the check did for the same wrong reply. Then
    shrinking preserves the model's clause.
    """
    best: tuple[list[Exchange], ClauseViolation] | None = None
    until, calls_left = time.monotonic() + SHRINK_SECONDS, float(MAX_SHRINK_CALLS)
    if any(isinstance(value, ArraySummary) for exchange in call_trace for value in exchange.request.args.values()):
        return None

    def attempt(requests: list[CallRequest]) -> bool:
        nonlocal best, calls_left
        if calls_left <= 0 or time.monotonic() > until:
            raise BudgetSpent
        calls_left -= len(requests)
        try:
            held, violation, *_ = holding(requests)
        except UnknownObject:
            return False
        calls_left -= _count_numbers(held) / NUMBERS_PER_CALL
        if violation is None:
            return False
        if best and is_error_text(violation.expected) and not is_error_text(best[1].expected):
            return False  # the simpler calls are invalid: one layer less, for example, and a layer that no longer exists
        in_the_same_reply = best is None and len(held) == len(call_trace)
        if clause and violation.clause not in (clause, best[1].clause if best else clause) and not in_the_same_reply:
            return False
        best = held, violation
        return True

    with suppress(BudgetSpent):
        if attempt([exchange.request for exchange in call_trace]):
            _simplify(_requests_of(best), attempt)
    return best


class BudgetSpent(Exception):
    """Raised in place of a further attempt once the time or the calls for shrinking are used up."""


def _simplify(requests: list[CallRequest], attempt: Callable[[list[CallRequest]], bool]) -> None:
    """Attempt shorter requests, then requests with fewer sequences, then smaller arguments, as long as they break the clause."""
    requests = _remove_operations(requests, attempt)
    requests = _remove_requests(requests, attempt, len(requests))
    for ways_to_shorten in (_with_one_result_less, _with_fewer_tokens_before_truncations):
        while shorter := next(filter(attempt, ways_to_shorten(requests)), None):
            requests = shorter

    def simplified(index: int, simpler: Iterator[CallRequest]) -> bool:
        """Replace a request by the first simpler one that still breaks the clause. Returns whether there is one."""
        for each in simpler:
            if attempt([*requests[:index], each, *requests[index + 1 :]]):
                requests[index] = each
                return True
        return False

    for index in range(len(requests)):
        while simplified(index, _with_half_the_rows(requests[index])):
            pass
        for ways in (_with_one_layer, _with_one_row, _with_fewer_tokens, _with_whole_numbers):
            simplified(index, ways(requests[index]))
    attempt(_remove_requests(requests, attempt, 1))  # calls of a layer that the smaller cache does not have, for example


def _remove_operations(requests: list[CallRequest], attempt: Callable[[list[CallRequest]], bool]) -> list[CallRequest]:
    """The requests without the operations that the failure does not need, the most frequent first.

    Most calls of a long call trace only look at the state. This removes them with few attempts.
    """
    for op, _ in Counter(request.op for request in requests[:-1]).most_common():
        shorter = _without_requests(requests, [request for request in requests[:-1] if request.op == op])
        if requests[-1] in shorter and attempt(shorter):
            requests = shorter
    return requests


def _remove_requests(requests: list[CallRequest], attempt: Callable[[list[CallRequest]], bool], size: int) -> list[CallRequest]:
    """The requests without those that the failure does not need. size: how many are removed at once at first."""
    while size:
        for start in range(len(requests) - 1 - size, -1, -size):
            shorter = _without_requests(requests, requests[start : start + size])
            if len(shorter) < len(requests) and attempt(shorter):
                requests = shorter
        size //= 2
    return requests


def _count_numbers(call_trace: list[Exchange]) -> int:
    """The number of array elements in the arguments and results of the calls."""
    replies = [exchange.reply.ok for exchange in call_trace if exchange.reply]
    results = [part for ok in replies for part in (ok if isinstance(ok, tuple) else (ok,))]
    arguments = [value for exchange in call_trace for value in exchange.request.args.values()]
    return sum(each.size for each in (*arguments, *results) if isinstance(each, np.ndarray))


def _requests_of(best: tuple[list[Exchange], ClauseViolation] | None) -> list[CallRequest]:
    return [exchange.request for exchange in best[0]] if best else []


def _without_requests(requests: list[CallRequest], removed: Sequence[CallRequest]) -> list[CallRequest]:
    """The requests without some of them, and without all requests that depend on these."""
    gone = {request.id for request in removed}
    kept = []
    for request in requests:
        if request.id in gone or referenced_ids(request) & gone:
            gone.add(request.id)
        else:
            kept.append(request)
    return kept


def _with_one_result_less(requests: list[CallRequest]) -> Iterator[list[CallRequest]]:
    """The requests without one that returned a sequence, and with an older sequence in its place.

    So the failure of a fork is reduced to one of the original, where both fail.
    """
    for index, removed in enumerate(requests):
        called = result_names().get(removed.op)
        for older in requests[:index] if called == "sequence" else ():
            if result_names().get(older.op) == called and older.on == removed.on:
                there = {removed.id: ReplyReference(older.id)}
                yield [
                    replace(each, args={name: _replace_references(value, there) for name, value in each.args.items()})
                    for each in requests
                    if each is not removed
                ]


def _with_fewer_tokens_before_truncations(requests: list[CallRequest]) -> Iterator[list[CallRequest]]:
    """The requests without an append, or with fewer tokens in it, and with later truncations of its sequence to as much less.

    A truncation names the length that remains. If only the append were shorter, this length could exceed that of the sequence.
    """

    def cut(request: CallRequest, appended: CallRequest, removed: int) -> CallRequest:
        length = request.args.get("length")
        same = request.on == appended.on and request.args.get("sequence") == appended.args.get("sequence")
        if request.name != "truncate" or not same or not isinstance(length, int) or length < removed:
            return request
        return replace(request, args=request.args | {"length": length - removed})

    for index, request in enumerate(requests):
        count = _count_tokens(request)
        if count and any(later.name == "truncate" for later in requests[index:]):
            for kept in [None, *_with_fewer_tokens(request)]:
                removed = count - (_count_tokens(kept) if kept else 0)
                later = [cut(each, request, removed) for each in requests[index + 1 :]]
                yield [*requests[:index], *([kept] if kept else []), *later]


def _replace_references(value: Any, there: dict[int, ReplyReference]) -> Any:
    if isinstance(value, list):
        return [_replace_references(part, there) for part in value]
    return there.get(value.id, value) if isinstance(value, ReplyReference) else value


def _with_one_layer(request: CallRequest) -> Iterator[CallRequest]:
    """For a request that creates a cache of several layers: the request with one layer.

    Other sizes are kept. With blocks of one token, for example, a reader could not tell a block from a token.
    """
    layers = request.args.get("num_layers")
    if request.name == "new" and isinstance(layers, int) and layers > 1:
        yield replace(request, args=request.args | {"num_layers": 1})


def _with_half_the_rows(request: CallRequest) -> Iterator[CallRequest]:
    """For a request of a function that works per row: the request with each half of the rows (a binary search)."""
    count = _count_rows(request)
    if count > 1:
        yield _select_rows(request, 0, count // 2)
        yield _select_rows(request, count // 2, count)


def _with_one_row(request: CallRequest) -> Iterator[CallRequest]:
    """For a request of a function that works per row: the request with each single row."""
    count = _count_rows(request)
    yield from (_select_rows(request, row, row + 1) for row in range(count if count > 1 else 0))


def _count_rows(request: CallRequest) -> int:
    """The number of rows in a request of a function that works per row; 0 for any other request."""
    if request.op not in ("rows.quantize", "rows.dequantize", "elements.encode", "elements.decode"):
        return 0
    lengths = {len(array) for array in _arrays_of(request).values()}
    return lengths.pop() if len(lengths) == 1 else 0


def _select_rows(request: CallRequest, start: int, stop: int) -> CallRequest:
    return replace(request, args=request.args | {name: array[start:stop] for name, array in _arrays_of(request).items()})


def _with_fewer_tokens(request: CallRequest) -> Iterator[CallRequest]:
    """For an appending request: the request with its first n tokens, for increasing n (see `_smaller_counts`)."""
    arrays, axis = _arrays_of_tokens(request)
    for length in _smaller_counts(_count_tokens(request)):
        fewer: dict[str, Any] = {name: np.take(array, range(length), axis=axis) for name, array in arrays.items()}
        if counts := request.args.get("counts"):  # the numbers of tokens per row
            fewer["counts"] = [min(count, length) for count in counts]
        yield replace(request, args=request.args | fewer)


def _count_tokens(request: CallRequest) -> int:
    """The number of tokens of an appending request; 0 if its arrays have different numbers of them, and for any other request."""
    arrays, axis = _arrays_of_tokens(request)
    lengths = {array.shape[axis] for array in arrays.values()}
    return lengths.pop() if len(lengths) == 1 else 0


def _arrays_of_tokens(request: CallRequest) -> tuple[dict[str, NDArray], int]:
    """The arrays of an appending request that have an axis of tokens, none for any other request; and this axis."""
    if request.name not in ("append", "append_fused", "write", "extend"):
        return {}, -1
    family = all_families().get(request.family)  # None for a buffer, whose values have one axis
    axis = family.token_axis if family else -1
    return {name: array for name, array in _arrays_of(request).items() if array.ndim >= max(1, -axis)}, axis


def _smaller_counts(count: int) -> Iterator[int]:
    """Numbers of tokens below `count`, in increasing order: all up to SMALL_COUNT, then powers of two and their neighbors."""
    yield from range(1, min(count, SMALL_COUNT + 1))
    for power in (2**exponent for exponent in range(5, count.bit_length() + 1)):
        yield from (each for each in (power - 1, power, power + 1) if each < count)


def _with_whole_numbers(request: CallRequest) -> Iterator[CallRequest]:
    """The request with its float32 values replaced by 1, 2, 3 and so on: readable, and different for each token."""
    first, whole = 1, dict[str, NDArray]()
    if sum(array.size for array in _arrays_of(request).values()) > MAX_TRIED_ROWS:
        return
    for name, array in _arrays_of(request).items():
        if array.dtype == np.float32:
            whole[name] = np.arange(first, first + array.size, dtype=np.float32).reshape(array.shape)
            first += array.size
    if any(not np.array_equal(whole[name], request.args[name]) for name in whole):
        yield replace(request, args=request.args | whole)


def _arrays_of(request: CallRequest) -> dict[str, NDArray]:
    return {name: value for name, value in request.args.items() if isinstance(value, np.ndarray)}
