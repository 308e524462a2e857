"""torchtune's KVCache (its file alone): an update with fewer sequences, fewer heads or a narrower head than the cache has."""

import importlib.util
from importlib.metadata import distribution

import torch

spec = importlib.util.spec_from_file_location("kv_cache", distribution("torchtune").locate_file("torchtune/modules/kv_cache.py"))
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

for what, shape in (("one sequence", (1, 2, 1, 4)), ("one kv head", (3, 1, 1, 4)), ("a width of 1", (3, 2, 1, 1))):
    cache = module.KVCache(batch_size=3, max_seq_len=8, num_kv_heads=2, head_dim=4, dtype=torch.float32)
    cache.update(torch.full(shape, 7.0), torch.full(shape, 7.0))
    written = cache.k_cache[:, :, 0] == 7
    print(f"{what}, in a cache of 3 sequences, 2 heads, a width of 4: {int(written.sum())} of 24 numbers, size {cache.size}")
