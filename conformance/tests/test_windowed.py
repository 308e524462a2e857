"""NaN from a token that left the window fails ATTN-07; NaN from a token that is still seen does not."""

import numpy as np
import pytest
from bugs.windows import what_left_the_window_weighs_zero_times_nan

from kvref.backend import ReferenceBackend
from kvref_conformance.calls.messages import CallReply, CallRequest, Exchange, ObjectReference
from kvref_conformance.exceptions import ClauseViolation
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.oracle.model_runner import ModelRunner
from kvref_conformance.runner.check_runner import CheckRunner, select_checks, verdict_of
from kvref_conformance.runner.options import Effort

SIZES = {"num_kv_heads": 1, "head_dim": 2, "window": 2, "sinks": 0, "chunk": 0, "rollback": 0, "dtype": "float32"}
ROW = np.ones((1, 1, 2), np.float32)
NAN = np.full_like(ROW, np.nan)


@pytest.mark.parametrize(
    ("number", "clause"),
    [(np.nan, "ATTN-07"), (np.inf, "ATTN-07"), (3e38, "ATTN-07"), (1e29, "WIN-01"), (1.0, "WIN-01")],  # 2 * 3e38 is infinite
)
def test_nan_is_blamed_on_what_left_where_that_can_have_made_it(number, clause):
    models = ModelRunner("exact")

    def answered(op, on, args, reply):
        request = CallRequest(len(seen) + 1, f"windowed.{op}", on, args)
        seen.append(request)
        models.judge(Exchange(request, CallReply(reply)), models.expect(request))

    seen = []
    answered("new", None, SIZES, ObjectReference(1))
    answered("append", 1, {"keys": ROW * np.float32(number), "values": ROW}, None)
    answered("append", 1, {"keys": ROW, "values": ROW}, None)
    with pytest.raises(ClauseViolation) as caught:
        answered("step", 1, {"query": ROW, "keys": ROW, "values": ROW, "scale": 1.0}, NAN)
    assert caught.value.clause == clause


def test_the_check_written_for_windows_finds_it(monkeypatch):
    what_left_the_window_weighs_zero_times_nan(monkeypatch)
    checks = [check for check in select_checks("ATTN-07", "windowed").popitem()[1] if check.run]
    assert checks
    assert verdict_of(CheckRunner(OnBackend(ReferenceBackend()), Effort()).judge_clause(checks)) == "failed"
