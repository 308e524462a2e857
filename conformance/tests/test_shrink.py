"""Shrinking of a call trace that breaks a clause."""

import numpy as np
import pytest

from kvref_conformance.calls.messages import CallRequest, Exchange
from kvref_conformance.exceptions import ClauseViolation
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
