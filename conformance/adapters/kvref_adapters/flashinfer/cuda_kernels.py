"""Adapters of FlashInfer's CUDA kernels: `flashinfer-*`. Not run yet: see docs/on-a-gpu.md.

- `flashinfer-prefill`: `single_prefill_with_kv_cache`, for the queries of the last tokens of one sequence.
- `flashinfer-decode`: `BatchDecodeWithPagedKVCacheWrapper`. Each query is a request with the number of tokens that it sees, in
  pages of 16 tokens that contain the later tokens too. Page tables are in descending order.
- `flashinfer-append`: `append_paged_kv_cache` as `scatter`, with the same tokens as keys and as values. Slots are positions of
  one request that has all pages. The cache is read by plain indexing.
"""

from importlib.metadata import version
from typing import Any, ClassVar

import flashinfer
import torch

from kvref_adapters._shared.attention import check_equal_shapes, check_paired_queries
from kvref_adapters._shared.cuda_arrays import CudaArrays, check_slots, pages_in_descending_order
from kvref_conformance.exceptions import NotOffered

PAGE = 16  # tokens of a page
STORE_PAGE = 4  # slots of a page, for `scatter`
WORKSPACE = 128 * 1024 * 1024  # bytes, as FlashInfer recommends


class FlashInfer(CudaArrays):
    version: ClassVar[str] = version("flashinfer-python")
    project = "flashinfer"
    limits: ClassVar[dict[str, Any]] = CudaArrays.limits | {"head_dim": [64, 128, 256]}


class FlashInferPrefill(FlashInfer):
    name = "flashinfer-prefill"

    def attention(self) -> "Prefill":
        return Prefill()


class Prefill:
    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        return self._attend(query, keys[:length], values[:length], scale, causal)

    def window_attention(self, query: Any, keys: Any, values: Any, *, scale: float, window: int, sinks: int, chunk: int) -> Any:
        if sinks or chunk:
            raise NotOffered("sink tokens and chunks")
        return self._attend(query, keys, values, scale, True, window_left=window - 1)

    def _attend(self, query: Any, keys: Any, values: Any, scale: float, causal: bool, **options: Any) -> Any:
        check_equal_shapes(query, keys, values)
        check_paired_queries(query, len(keys))
        return flashinfer.single_prefill_with_kv_cache(query, keys, values, causal=causal, sm_scale=scale, **options)


class FlashInferDecode(FlashInfer):
    name = "flashinfer-decode"
    limits: ClassVar[dict[str, Any]] = FlashInfer.limits | {"group_size": [1, 2, 4, 8]}  # of its kernels without tensor cores

    def __init__(self) -> None:
        super().__init__()
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")

    def attention(self) -> "Decoding":
        return Decoding(self._wrapper)


class Decoding:
    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def attention(self, query: Any, keys: Any, values: Any, *, scale: float, causal: bool, length: int) -> Any:
        check_equal_shapes(query, keys, values)
        check_paired_queries(query, length)
        count, pages = len(query), [pages_in_descending_order(each, PAGE) for each in (keys, values)]
        lengths = [length - count + 1 + at if causal else length for at in range(count)]
        tables = [range(len(pages[0]) - 1, len(pages[0]) - 1 - -(-each // PAGE), -1) for each in lengths]
        starts = [sum(map(len, tables[:at])) for at in range(count + 1)]
        last = [(each - 1) % PAGE + 1 for each in lengths]
        numbers = (starts, [page for table in tables for page in table], last)
        self._wrapper.plan(
            *(torch.tensor(each, dtype=torch.int32, device=query.device) for each in numbers),
            query.shape[1], keys.shape[1], query.shape[2], PAGE,
            sm_scale=scale, q_data_type=query.dtype, kv_data_type=keys.dtype,
        )  # fmt: skip
        return self._wrapper.run(query, tuple(pages))


class FlashInferAppend(FlashInfer):
    name = "flashinfer-append"

    def kernels(self) -> "FlashInferAppend":
        return self

    def scatter(self, store: Any, slots: Any, new: Any) -> Any:
        check_scatter(store, slots, new)
        count, pages, device = len(slots), len(store) // STORE_PAGE, store.device
        cache = tuple(each.unflatten(0, (pages, STORE_PAGE)) for each in (store, store.clone()))
        flashinfer.append_paged_kv_cache(
            new, new, torch.zeros(count, dtype=torch.int32, device=device), slots.to(torch.int32), cache,
            *(torch.tensor(each, dtype=torch.int32, device=device) for each in (range(pages), [0, pages], [STORE_PAGE])),
        )  # fmt: skip
        return store

    def gather(self, store: Any, slots: Any) -> Any:
        check_slots(store, slots)
        return store[slots.long()]


def check_scatter(store: Any, slots: Any, new: Any) -> None:
    """Raise NotOffered for calls that FlashInfer leaves to the engine: malformed ones, and slots of padding."""
    check_slots(store, slots)
    if new.shape[1:] != store.shape[1:] or len(new) != len(slots) or {new.dtype, store.dtype} != {torch.float16}:
        raise NotOffered("tokens of another shape or dtype than the store, which the kernel does not check")
    if store.ndim != 3 or len(store) % STORE_PAGE or len(slots.unique()) < len(slots):
        raise NotOffered("stores without whole pages, and slots that occur twice")
