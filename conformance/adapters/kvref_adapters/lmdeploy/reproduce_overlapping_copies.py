"""LMDeploy's `copy_cache_blocks`, interpreted: blocks that are sources and targets of one call."""

import kvref_adapters.lmdeploy.triton_kernels  # noqa: F401 # isort: skip - first: imports the kernels alone, and starts Triton's interpreter

import torch
from lmdeploy.pytorch.kernels.cuda.copy_cache import copy_cache_blocks

for sources, targets in (([0, 1], [1, 0]), ([0, 1, 2], [1, 2, 3])):
    cache = torch.arange(4.0).view(4, 1)
    copy_cache_blocks(cache, 0, torch.tensor(sources), torch.tensor(targets), 1)
    print("blocks 0, 1, 2, 3 after copies of", sources, "to", targets, "contain", cache.flatten().tolist())
