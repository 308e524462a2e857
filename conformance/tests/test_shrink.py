"""Shrinking of a call trace that breaks a clause."""

from types import SimpleNamespace

import numpy as np
import pytest

from kvref_conformance.calls.messages import CallRequest, Exchange, ReplyReference
from kvref_conformance.exceptions import ClauseViolation
from kvref_conformance.traces import shrinking
from kvref_conformance.traces.shrinking import ReplayResult, shrink_trace


@pytest.mark.parametrize("rows", [1, 2])
def test_the_rows_that_break_it_are_found_among_thousands(rows):
    """A row that is wrong alone is kept alone; a row that is wrong only together with others is kept with these."""
    call_trace = [Exchange(CallRequest(1, "elements.encode", None, {"values": np.arange(5000, dtype=np.float32), "format": "e"}))]
    tried = []

    def holding(requests):
        (values,) = (request.args["values"] for request in requests)
        tried.append(len(values))
        wrong = 4321 in values and len(values) >= rows
        return ReplayResult(
            [Exchange(request) for request in requests], ClauseViolation("", "", "", "FMT-FP8-02") if wrong else None
        )

    ((smallest,), _) = shrink_trace(call_trace, "FMT-FP8-02", holding)
    assert (len(smallest.request.args["values"]), len(tried) < 40) == (rows, True)


def test_an_array_with_too_few_axes_stays_as_it_is_while_the_other_gets_fewer_tokens():
    wrong = {"keys": np.zeros((4, 1, 1), np.float32), "values": np.zeros((4, 1), np.float32)}
    call_trace = [Exchange(CallRequest(1, "windowed.append", None, wrong))]

    def holding(requests):
        return ReplayResult([Exchange(request) for request in requests], ClauseViolation("", "", "", "LAW-01"))

    ((smallest,), _) = shrink_trace(call_trace, "LAW-01", holding)
    assert [smallest.request.args[name].shape for name in ("keys", "values")] == [(1, 1, 1), (4, 1)]


@pytest.mark.parametrize("needs_fork", [True, False])
def test_a_fork_is_replaced_by_its_original_if_the_original_fails_too(needs_fork):
    """`drop` of a fork needs the fork, so removing calls alone cannot remove it."""
    new = CallRequest(1, "paged.new", None, {})
    create = CallRequest(2, "paged.create", 1, {})
    fork = CallRequest(3, "paged.fork", 1, {"sequence": ReplyReference(2)})
    drop = CallRequest(4, "paged.drop", 1, {"sequence": ReplyReference(3)})

    def holding(requests):
        fails = requests[:2] == [new, create] and drop.op == requests[-1].op and (not needs_fork or fork in requests)
        return ReplayResult(
            [Exchange(request) for request in requests], ClauseViolation("", "", "", "PAGED-07") if fails else None
        )

    smallest, _ = shrink_trace([Exchange(each) for each in (new, create, fork, drop)], "PAGED-07", holding)
    dropped = CallRequest(4, "paged.drop", 1, {"sequence": ReplyReference(2)})
    assert [each.request for each in smallest] == ([new, create, fork, drop] if needs_fork else [new, create, dropped])


@pytest.mark.parametrize("needed", [1, 3])
def test_a_cache_gets_one_layer_if_it_fails_with_one_too(needed):
    call_trace = [Exchange(CallRequest(1, "paged.new", None, {"num_blocks": 6, "num_layers": 3}))]

    def holding(requests):
        fails = requests[0].args["num_layers"] >= needed
        return ReplayResult(
            [Exchange(request) for request in requests], ClauseViolation("", "", "", "PAGED-07") if fails else None
        )

    ((smallest,), _) = shrink_trace(call_trace, "PAGED-07", holding)
    assert smallest.request.args == {"num_blocks": 6, "num_layers": needed}


NEW = CallRequest(1, "paged.new", None, {})


def holding_invalid_layers(requests):
    """Fails with PAGED-07 if `length` is called last; a call of layer 1 of a cache with one layer must raise."""
    layers = requests[0].args["num_layers"] if requests else 0
    for made, request in enumerate(requests, 1):
        if request.args.get("layer", 0) >= layers and "accepts" in requests[0].args:
            missing = ClauseViolation("", "LayerOutOfRange to be raised", "no error", "LAW-11")
            return ReplayResult([Exchange(each) for each in requests[:made]], missing)
        if request.name == "length" and (layers == 1 or [each.name for each in requests].count("write") == 2):
            return ReplayResult([Exchange(each) for each in requests[:made]], ClauseViolation("", "1", "2", "PAGED-07"))
    return ReplayResult([Exchange(each) for each in requests])


def test_calls_that_only_look_are_removed_together():
    looks = [CallRequest(id, "paged.length", 1, {}) for id in range(3, 103)]
    write, gather = CallRequest(2, "paged.write", 1, {}), CallRequest(103, "paged.gather", 1, {})
    call_trace = [Exchange(each) for each in (NEW, write, *looks, gather)]
    tried = []

    def holding(requests):
        tried.append(len(requests))
        fails = {"new", "write", "gather"} <= {each.name for each in requests}
        return ReplayResult([Exchange(each) for each in requests], ClauseViolation("", "", "", "PAGED-12") if fails else None)

    smallest, _ = shrink_trace(call_trace, "PAGED-12", holding)
    assert [each.request.name for each in smallest] == ["new", "write", "gather"] and sum(tried) < 250


@pytest.mark.parametrize("accepts", [False, True])
def test_shrinking_makes_no_call_invalid_and_removes_calls_that_fewer_layers_make_useless(accepts):
    sizes = {"num_layers": 2} | ({"accepts": 1} if accepts else {})
    calls = [("new", sizes), ("write", {"layer": 0}), ("write", {"layer": 1}), ("length", {"layer": 1 if accepts else 0})]
    call_trace = [
        Exchange(CallRequest(id, f"paged.{name}", 1 if id > 1 else None, args)) for id, (name, args) in enumerate(calls, 1)
    ]
    smallest, violation = shrink_trace(call_trace, "", holding_invalid_layers)
    assert violation.clause == "PAGED-07"
    assert [each.request.name for each in smallest] == ([name for name, _ in calls] if accepts else ["new", "length"])


@pytest.mark.parametrize("numbers", [1, 2 * shrinking.NUMBERS_PER_CALL])
def test_the_number_of_replayed_calls_is_limited_and_large_arrays_count_as_calls(monkeypatch, numbers):
    """The clock stands still: time must not matter, so that a busy machine finds the same calls."""
    monkeypatch.setattr(shrinking, "time", SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(shrinking, "MAX_SHRINK_CALLS", 100)
    array, tried = np.zeros(numbers, np.float32), 0
    call_trace = [Exchange(CallRequest(id, "windowed.look", None, {"array": array})) for id in range(30)]

    def holding(requests):
        nonlocal tried
        tried += len(requests)
        wrong = ClauseViolation("", "", "", "LAW-01") if len(requests) == len(call_trace) else None
        return ReplayResult([Exchange(request) for request in requests], wrong)

    shortest, _ = shrink_trace(call_trace, "LAW-01", holding)
    assert len(shortest) == len(call_trace)
    assert (100 <= tried < 130) if numbers == 1 else (30 <= tried < 60)


def test_no_shorter_calls_are_made_up_once_the_budget_is_spent(monkeypatch):
    """There are millions of pairs of a sequence and an older one that could stand for it."""
    new, creates = CallRequest(1, "paged.new", None, {}), [CallRequest(id, "paged.create", 1, {}) for id in range(2, 4002)]
    made, replacement = 0, shrinking.replace

    def replace(*args, **changes):
        nonlocal made
        made += 1
        return replacement(*args, **changes)

    monkeypatch.setattr(shrinking, "replace", replace)

    def holding(requests):
        return ReplayResult([Exchange(each) for each in requests], ClauseViolation("", "", "", "PAGED-07"))

    monkeypatch.setattr(shrinking, "MAX_SHRINK_CALLS", 4001)
    smallest, _ = shrink_trace([Exchange(each) for each in (new, *creates)], "PAGED-07", holding)
    assert (len(smallest), made) == (4001, 0)
