"""Adapters of PyTorch's attention on a CPU: `torch-sdpa` (`scaled_dot_product_attention`), `torch-flex` (`flex_attention`).

Queries of the last tokens are expressed in PyTorch's way: `is_causal` if there are as many queries as tokens,
`causal_lower_right` if there are fewer. Tokens past the length, as in a buffer that is not full, are masked. For flex, masks are
functions of positions, and a logit sink is one extra token, whose score `score_mod` sets.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from kvref.errors import DtypeMismatch, ShapeMismatch
from kvref_conformance.interface import Level


class _Torch:
    version = str(torch.__version__)
    project = "torch"
    level: Level = "exact"
    formats = ("float32",)

    def __init__(self) -> None:
        torch.set_num_threads(1)

    def asarray(self, values: Any) -> Any:
        return torch.tensor(values)

    def to_numpy(self, array: Any) -> Any:
        return array.numpy()


class Sdpa(_Torch):
    name = "torch-sdpa"
    language = "c++"

    def attention(self) -> "Sdpa.Calls":
        return self.Calls()

    class Calls:
        def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
            queries, tokens = len(query), len(keys)
            whole = causal and queries == tokens == length
            mask = None
            if length != tokens:
                seen = torch.arange(tokens)[None] < length
                mask = seen & (torch.arange(tokens)[None] <= torch.arange(length - queries, length)[:, None]) if causal else seen
            elif causal and not whole:
                mask = causal_lower_right(queries, tokens)
            return _attended(
                query, keys, values,
                lambda q, k, v, **grouped: scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=whole, scale=scale, **grouped
                ),
            )  # fmt: skip


class Flex(_Torch):
    name = "torch-flex"
    language = "python"

    def attention(self) -> "Flex.Calls":
        return self.Calls()

    class Calls:
        def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
            first = length - len(query)

            def seen(batch: Any, head: Any, q: Any, kv: Any) -> Any:
                return (kv < length) & (kv <= first + q) if causal else kv < length

            return _flexed(query, keys, values, scale, seen)

        def window_attention(
            self, query: Any, keys: Any, values: Any, *, scale: float, window: int, sinks: int, chunk: int
        ) -> Any:
            first = len(keys) - len(query)

            def seen(batch: Any, head: Any, q: Any, kv: Any) -> Any:
                at = first + q
                near = (kv > at - window) & (at // chunk == kv // chunk if chunk else True)
                return (kv <= at) & (near | (kv < sinks))

            return _flexed(query, keys, values, scale, seen)

        def sink_attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, logit_sink: Any) -> Any:
            first, sink = len(keys) - len(query), len(keys)

            def seen(batch: Any, head: Any, q: Any, kv: Any) -> Any:
                return (kv == sink) | (kv <= first + q) if causal else kv <= sink

            def scored(score: Any, batch: Any, head: Any, q: Any, kv: Any) -> Any:
                return torch.where(kv == sink, logit_sink[head], score)

            keys, values = (pad(array, (0, 0, 0, 0, 0, 1)) for array in (keys, values))
            return _flexed(query, keys, values, scale, seen, scored)


def _flexed(query: Any, keys: Any, values: Any, scale: float, seen: Any, scored: Any = None) -> Any:
    mask = create_block_mask(seen, None, None, len(query), len(keys), device="cpu")
    return _attended(
        query, keys, values,
        lambda *given, **grouped: flex_attention(*given, score_mod=scored, block_mask=mask, scale=scale, **grouped),
    )  # fmt: skip


def _attended(query: Any, keys: Any, values: Any, attend: Callable[..., Any]) -> Any:
    """Attend as a batch of one, heads before tokens. Maps PyTorch's exceptions to the specification's errors."""
    try:
        given = [array.transpose(0, 1)[None] for array in (query, keys, values)]
        grouped = {"enable_gqa": True} if query.shape[1] != keys.shape[1] else {}
        return attend(*given, **grouped)[0].transpose(0, 1)
    except (RuntimeError, ValueError, IndexError) as error:
        raise (DtypeMismatch if "dtype" in str(error) else ShapeMismatch)(str(error)) from error
