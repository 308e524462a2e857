"""Adapters of SGLang's Triton attention: `sglang-triton-decode` and `sglang-triton-extend`.

Both read keys and values from slots of a pool, in descending order; all other slots contain NaN.

- `decode_attention_fwd`, with up to four splits. Each query is a request with the number of tokens that it sees.
- `extend_attention_fwd`. The queries are those of the last tokens, whose keys and values it gets as arrays; earlier tokens are in
  the pool. A window of n tokens is a `sliding_window_size` of n - 1, as SGLang's models state it.
"""

from typing import Any, ClassVar

import torch

from kvref_adapters._shared.attention import check_matching_shapes, check_paired_queries
from kvref_adapters._shared.torch_arrays import OneThreadTorch
from kvref_adapters.sglang.triton_modules import VERSION
from kvref_conformance.exceptions import NotOffered

from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd  # isort: skip - after the modules
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd  # isort: skip

SPLITS = 4


class SGLangTriton(OneThreadTorch):
    version = VERSION
    language = "triton"
    project = "sglang"
    limits: ClassVar[dict[str, Any]] = {"dtype": ["float32"], "tokens": {"least": 1}, "threads": False}


class SGLangTritonDecode(SGLangTriton):
    name = "sglang-triton-decode"

    def attention(self) -> "Decoding":
        return Decoding()


class SGLangTritonExtend(SGLangTriton):
    name = "sglang-triton-extend"

    def attention(self) -> "Extending":
        return Extending()


class Decoding:
    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        return self._attend(query, keys[:length], values[:length], scale, causal)

    def sink_attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, logit_sink: Any) -> Any:
        return self._attend(query, keys, values, scale, causal, logit_sink)

    def _attend(self, query: Any, keys: Any, values: Any, scale: float, causal: bool, sinks: Any = None) -> Any:
        check_matching_shapes(query, keys, values)
        (key_pool, value_pool), slots = pooled(keys, values)
        return attend_slots(query, key_pool, value_pool, slots, scale, causal, sinks)


def attend_slots(query: Any, keys: Any, values: Any, slots: Any, scale: float, causal: bool, sinks: Any = None) -> Any:
    """Return attention over the tokens in these slots of the pools."""
    count, seen = len(query), torch.full((len(query),), len(slots))
    if causal:
        check_paired_queries(query, len(slots))
        seen += torch.arange(1 - count, 1)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), seen.cumsum(0)]).to(torch.int32)
    out = torch.empty(*query.shape[:2], values.shape[2])
    decode_attention_fwd(
        query.contiguous(), keys, values, out, indptr, torch.cat([slots[:each] for each in seen]),
        torch.empty(*query.shape[:2], SPLITS, values.shape[2]), torch.empty(*query.shape[:2], SPLITS),
        torch.full((count,), SPLITS, dtype=torch.int32), SPLITS, scale, 1.0, 1.0, sinks=sinks,
    )  # fmt: skip
    return out


class Extending:
    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        return self._attend(query, keys[:length], values[:length], scale, causal)

    def window_attention(self, query: Any, keys: Any, values: Any, *, scale: float, window: int, sinks: int, chunk: int) -> Any:
        if sinks or chunk:
            raise NotOffered("sink tokens and chunks that begin where a query's chunk begins")
        return self._attend(query, keys, values, scale, True, sliding_window_size=window - 1)

    def sink_attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, logit_sink: Any) -> Any:
        return self._attend(query, keys, values, scale, causal, sinks=logit_sink)

    def _attend(self, query: Any, keys: Any, values: Any, scale: float, causal: bool, **options: Any) -> Any:
        check_matching_shapes(query, keys, values)
        check_paired_queries(query, len(keys))
        count, cached = len(query), len(keys) - len(query)
        pools, slots = pooled(keys[:cached], values[:cached])
        out = torch.empty(*query.shape[:2], values.shape[2])
        extend_attention_fwd(
            query.contiguous(), keys[cached:].contiguous(), values[cached:].contiguous(), out, *pools,
            torch.tensor([0, count], dtype=torch.int32), torch.tensor([0, cached], dtype=torch.int32), slots, None, causal, None,
            count, 1.0, 1.0, sm_scale=scale, **options,
        )  # fmt: skip
        return out


def pooled(keys: Any, values: Any) -> tuple[list[Any], Any]:
    """Return pools that contain the tokens in every second slot, and the slots of the tokens."""
    slots = torch.arange(2 * len(keys), 0, -2)
    pools = []
    for tokens in (keys, values):
        pool = torch.full((2 * len(keys) + 1, *tokens.shape[1:]), torch.nan)
        pool[slots] = tokens
        pools.append(pool)
    return pools, slots
