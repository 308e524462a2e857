"""Adapters of the PyTorch operators from which caches are built, on a CPU: attention, indexing, casts to float8.

Adapters of PyTorch's attention on a CPU: `torch-sdpa` (`scaled_dot_product_attention`), `torch-flex` (`flex_attention`).

Queries of the last tokens are expressed in PyTorch's way: `is_causal` if there are as many queries as tokens,
`causal_lower_right` if there are fewer. Tokens past the length, as in a buffer that is not full, are masked. For flex, masks are
functions of positions, and a logit sink is one extra token, whose score `score_mod` sets.

Adapters of PyTorch's indexing as slot kernels, on the CPU: the operations from which caches in PyTorch are built.

`torch-kernels` scatters with `index_copy_` and gathers with `index_select`, like transformers' StaticCache and LitGPT;
`torch-kernels-put` scatters by index assignment, like torchtune, where negative slots count from the end. An update is the
assignment to a slice. Blocks are a view of the store, whole blocks only. Slots are passed unchanged: nothing is checked or cast.

Adapter of PyTorch's float8 dtypes: casts value by value on the CPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention

from kvref.errors import DtypeMismatch, ShapeMismatch, SlotOutOfRange
from kvref_adapters._shared.torch_arrays import OneThreadTorch, TorchArrays


class _Torch(OneThreadTorch):
    version = str(torch.__version__)
    project = "torch"


class TorchSdpa(_Torch):
    name = "torch-sdpa"
    language = "c++"

    def attention(self) -> "TorchSdpa.Calls":
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


class TorchFlex(_Torch):
    name = "torch-flex"
    language = "python"

    def attention(self) -> "TorchFlex.Calls":
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


class TorchIndexCopy(_Torch):
    name = "torch-kernels"
    language = "c++"

    def kernels(self) -> "TorchIndexCopy":
        return self

    def scatter(self, store: Any, slots: Any, new: Any) -> Any:
        try:
            self._put(store, slots, new)
        except (RuntimeError, IndexError) as error:
            raise _in_our_words(error) from error
        return store

    def gather(self, store: Any, slots: Any) -> Any:
        try:
            return self._take(store, slots)
        except (RuntimeError, IndexError) as error:
            raise _in_our_words(error) from error

    def copy(self, store: Any, sources: Any, targets: Any, block_size: int) -> Any:
        count = len(store) // block_size
        blocks = store[: count * block_size].view(count, block_size, *store.shape[1:])
        self.scatter(blocks, targets, self.gather(blocks, sources))
        return store

    def update(self, buffer: Any, new: Any, position: int) -> Any:
        try:
            buffer[:, :, position : position + new.shape[2]] = new
        except RuntimeError as error:
            raise _in_our_words(error) from error
        return buffer

    def _put(self, store: Any, slots: Any, new: Any) -> None:
        store.index_copy_(0, slots, new)

    def _take(self, store: Any, slots: Any) -> Any:
        return store.index_select(0, slots)


class TorchIndexPut(TorchIndexCopy):
    name = "torch-kernels-put"

    def _put(self, store: Any, slots: Any, new: Any) -> None:
        store[slots] = new

    def _take(self, store: Any, slots: Any) -> Any:
        return store[slots]


def _in_our_words(error: Exception) -> Exception:
    said = str(error)
    if "out of bounds" in said or "out of range" in said:
        return SlotOutOfRange(said)
    if any(word in said for word in ("dtype", "scalar type", "Expected a long tensor", "tensors used as indices")):
        return DtypeMismatch(said)
    return ShapeMismatch(said)


class TorchFloat8(TorchArrays):
    name = "torch-float8"
    version = str(torch.__version__)
    language = "c++"
    project = "torch"
    formats = ("float8_e4m3fn", "float8_e5m2")

    def elements(self) -> "TorchFloat8":
        return self

    def encode(self, values: Any, format: str) -> Any:
        return values.to(getattr(torch, format)).view(torch.uint8)

    def decode(self, codes: Any, format: str) -> Any:
        return codes.view(getattr(torch, format)).to(torch.float32)
