"""The reference model: float64 attention and the bound for float32 results. The model runner adds rounding to narrower dtypes."""

from functools import partial
from typing import Any

import numpy as np

from kvref_conformance.oracle.attention import U, attention, other_convention, visible_positions
from kvref_conformance.oracle.expectations import Expectation, ExpectedArrays, UnjudgedReply, all_finite, to_float32  # fmt: skip
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.oracle.reference_model import FunctionModel


class Attention(FunctionModel):
    family = "attention"

    def attention(self, query: Any, keys: Any, values: Any, scale: float, causal: bool, length: int) -> Expectation:
        if length > len(keys):
            raise ValueError("shapes that do not fit")
        return _expected("ATTN-04", query, keys[:length], values[:length], scale, causal=causal)

    def window_attention(
        self, query: Any, keys: Any, values: Any, scale: float, window: int, sinks: int, chunk: int
    ) -> Expectation:
        first = len(keys) - len(query)
        views = [visible_positions(at, window, sinks, chunk) for at in range(first, len(keys))]
        return _expected("WIN-07" if chunk else "WIN-05" if sinks else "WIN-01", query, keys, values, scale, views=views)

    def sink_attention(self, query: Any, keys: Any, values: Any, scale: float, causal: bool, logit_sink: Any) -> Expectation:
        sink = to_float32(logit_sink)
        if sink.shape != query.shape[1:2] or not (
            all_finite(sink[sink > -np.inf]) and np.abs(sink[sink > -np.inf]).max(initial=0) < 1e30
        ):
            raise ValueError("logit_sink: expected one per query head")
        return _expected("WIN-08", query, keys, values, scale, causal=causal, logit_sink=sink)


def _expected(clause: str, query: Any, keys: Any, values: Any, scale: float, **options: Any) -> Expectation:
    query, keys, values = (to_float32(part) for part in (query, keys, values))
    if query.ndim != 3 or keys.ndim != 3 or query.shape[1] % keys.shape[1]:
        raise ValueError("shapes that do not fit")
    reach = [float(np.abs(part).max(initial=0)) for part in (query, keys)]
    if not all_finite(query, keys, values) or reach[0] * reach[1] * query.shape[2] * max(1.0, abs(scale)) > 1e38:
        return UnjudgedReply(clause)  # the scores overflow float32
    out, bound = attention(query, keys, values, scale=scale, **options)
    return ExpectedArrays(
        clause,
        parts=(ExpectedReads(out.astype(np.float32), bound + U * np.abs(out)),),
        always_slack=True,
        explain=partial(other_convention, query, keys, values, scale=scale, **options),
    )
