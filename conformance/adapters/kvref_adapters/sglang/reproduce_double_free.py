"""SGLang's allocators: a slot that is freed twice, and a negative size."""

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

options = {"dtype": torch.float16, "device": "cpu", "kvcache": None, "need_sort": False}
for pool, count in ((TokenToKVPoolAllocator(4, **options), 1), (PagedTokenToKVPoolAllocator(16, 4, **options), 4)):
    slots = pool.alloc(4 * count)  # all of them
    for _ in range(2):
        pool.free(slots[-count:])
    print(type(pool).__name__, "free", pool.available_size(), "then", pool.alloc(count).tolist(), pool.alloc(count).tolist())
    pool.clear()
    print("alloc of", -count, "returns", pool.alloc(-count).tolist(), "and leaves", pool.available_size())
