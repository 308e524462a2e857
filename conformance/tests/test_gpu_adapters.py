"""Adapters of CUDA kernels, on a CPU with stand-ins that compute what the documentation of the kernels defines."""

import sys
from importlib import import_module
from types import ModuleType

import pytest

from kvref_conformance.runner.check_runner import CheckRunner, select_checks
from kvref_conformance.runner.options import Effort

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def attend(query, keys, values, scale, causal, window):
    """Attention of the last tokens in float32, rounded once. The mask ends at the last token, as FlashAttention documents it."""
    query, keys, values = (each.float() for each in (query, keys, values))
    keys, values = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    distance = torch.arange(len(query))[:, None] + len(keys) - len(query) - torch.arange(len(keys))
    hidden = (distance < 0) & causal | (distance > window) & (window >= 0)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(2)
    weights = weights.masked_fill(hidden, 0)
    seen = torch.where(hidden[None, :, :, None], 0.0, values.transpose(0, 1)[:, None])  # NaN that is not seen has no effect
    return torch.einsum("hqk,hqkd->qhd", weights, seen).half()


def from_pages(pages, table, length):
    return pages[table.long()].flatten(0, 1)[:length]


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    return attend(q[0], k[0], v[0], softmax_scale, causal, window_size[0])[None]


def flash_attn_with_kvcache(
    q, k_cache, v_cache, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1)
):
    assert k_cache.shape[1] % 256 == 0 and block_table.dtype == cache_seqlens.dtype == torch.int32
    tokens = (from_pages(pages, block_table[0], cache_seqlens[0]) for pages in (k_cache, v_cache))
    return attend(q[0], *tokens, softmax_scale, causal, window_size[0])[None]


def single_prefill_with_kv_cache(q, k, v, causal=False, sm_scale=None, window_left=-1):
    return attend(q, k, v, sm_scale, causal, window_left)


class BatchDecodeWithPagedKVCacheWrapper:
    def __init__(self, workspace, kv_layout):
        assert kv_layout == "NHD"

    def plan(self, indptr, indices, last_page_len, heads, kv_heads, head_dim, page_size, *, sm_scale, q_data_type, kv_data_type):
        self.planned = indptr, indices, last_page_len
        self.sizes, self.scale = (heads, kv_heads, head_dim, page_size), sm_scale

    def run(self, q, paged_kv_cache):
        indptr, indices, last = self.planned
        keys, values = paged_kv_cache
        assert self.sizes == (q.shape[1], keys.shape[2], q.shape[2], keys.shape[1])
        outputs = []
        for at, query in enumerate(q):
            table = indices[indptr[at] : indptr[at + 1]]
            length = (len(table) - 1) * keys.shape[1] + int(last[at])
            tokens = (from_pages(pages, table, length) for pages in (keys, values))
            outputs.append(attend(query[None], *tokens, self.scale, False, -1))
        return torch.cat(outputs)


def append_paged_kv_cache(key, value, batch_indices, positions, cache, kv_indices, kv_indptr, kv_last_page_len):
    pages = kv_indices[kv_indptr[batch_indices.long()].long() + positions.long() // cache[0].shape[1]]
    for new, store in zip((key, value), cache, strict=True):
        store[pages.long(), positions.long() % store.shape[1]] = new


def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    seen = slot_mapping >= 0
    for new, cache in ((key, key_cache), (value, value_cache)):
        cache.flatten(0, 1)[slot_mapping[seen].long()] = new[seen]


def module(name, **functions):
    made = ModuleType(name)
    made.__dict__.update(functions)
    return made


@pytest.fixture
def stand_ins(monkeypatch):
    """The modules of the kernels, and arrays on the CPU."""
    import importlib.metadata

    flash = module(
        "flash_attn", flash_attn_func=flash_attn_func, flash_attn_with_kvcache=flash_attn_with_kvcache, __version__="0 (stand-in)"
    )
    infer = module(
        "flashinfer", single_prefill_with_kv_cache=single_prefill_with_kv_cache, append_paged_kv_cache=append_paged_kv_cache,
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
    )  # fmt: skip
    vllm = module("vllm", _custom_ops=module("vllm._custom_ops", reshape_and_cache_flash=reshape_and_cache_flash))
    for each in (flash, infer, vllm):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0" if name in ("flashinfer-python", "vllm") else real(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("tensor", "zeros"):
        create = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, create=create, device=None, **named: create(*args, **named))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("kvref_adapters"):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("where", "found", "least"),
    [
        ("flash_attn.cuda_attention", "FlashAttn", 8),
        ("flash_attn.cuda_attention", "FlashAttnPaged", 8),
        ("flashinfer.cuda_kernels", "FlashInferPrefill", 8),
        ("flashinfer.cuda_kernels", "FlashInferDecode", 6),
        ("flashinfer.cuda_kernels", "FlashInferAppend", 2),
        ("vllm.cuda_store", "VllmCudaStore", 4),
    ],
)
def test_a_right_kernel_passes_through_its_adapter(stand_ins, where, found, least):
    implementation = getattr(import_module(f"kvref_adapters.{where}"), found)()
    judge = CheckRunner(implementation, effort=Effort(examples=2))
    families = "attention" if hasattr(implementation, "attention") else "kernels"
    chosen = select_checks("ATTN-*,KERN-*,WIN-*,LAW-08", families)
    results = {clause.id: judge.judge_clause(checks) for clause, checks in chosen.items()}
    failed = [(clause, each) for clause, said in results.items() for each in said if each.verdict == "failed"]
    assert not failed, failed
    assert sum(any(each.verdict == "passed" for each in said) for said in results.values()) >= least


def test_without_a_device_the_adapter_says_what_it_needs(stand_ins, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        import_module("kvref_adapters.flash_attn.cuda_attention").FlashAttn()
