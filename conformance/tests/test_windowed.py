"""NaN from a token that left the window fails ATTN-07; NaN from a token that is still seen does not."""

import numpy as np
import pytest
from bugs.windows import what_left_the_window_weighs_zero_times_nan

from kvref.backend import ReferenceBackend
from kvref_conformance.conversation.exchange import Exchange, On, Reply, Request
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.judging.asked import Effort
from kvref_conformance.judging.judge import Judge, select, verdict_of
from kvref_conformance.oracle.witness import Witness
from kvref_conformance.outcome import Broken

SIZES = {"num_kv_heads": 1, "head_dim": 2, "window": 2, "sinks": 0, "chunk": 0, "rollback": 0, "dtype": "float32"}
ROW = np.ones((1, 1, 2), np.float32)
NAN = np.full_like(ROW, np.nan)


@pytest.mark.parametrize(
    ("number", "clause"),
    [(np.nan, "ATTN-07"), (np.inf, "ATTN-07"), (3e38, "ATTN-07"), (1e29, "WIN-01"), (1.0, "WIN-01")],  # 2 * 3e38 is infinite
)
def test_nan_is_blamed_on_what_left_where_that_can_have_made_it(number, clause):
    witness = Witness("exact")

    def answered(op, on, args, reply):
        request = Request(len(seen) + 1, f"windowed.{op}", on, args)
        seen.append(request)
        witness.judge(Exchange(request, Reply(reply)), witness.expect(request))

    seen = []
    answered("new", None, SIZES, On(1))
    answered("append", 1, {"keys": ROW * np.float32(number), "values": ROW}, None)
    answered("append", 1, {"keys": ROW, "values": ROW}, None)
    with pytest.raises(Broken) as caught:
        answered("step", 1, {"query": ROW, "keys": ROW, "values": ROW, "scale": 1.0}, NAN)
    assert caught.value.clause == clause


def test_the_check_written_for_windows_finds_it(monkeypatch):
    what_left_the_window_weighs_zero_times_nan(monkeypatch)
    checks = [check for check in select("ATTN-07", "windowed").popitem()[1] if check.run]
    assert checks
    assert verdict_of(Judge(OnBackend(ReferenceBackend()), Effort()).clause(checks)) == "failed"
