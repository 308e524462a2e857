"""LMCache's pages: batches that do not fit, with a negative count, and with a count of NumPy's int8."""

import numpy as np
import torch
from lmcache.v1.memory_allocators.paged_tensor_memory_allocator import PagedTensorMemoryAllocator

page = torch.Size([4096])
for count in (5, -1, np.int8(3)):
    pool = PagedTensorMemoryAllocator(torch.zeros(4 * 4096, dtype=torch.uint8), [page], [torch.uint8])
    one = pool.allocate(page, torch.uint8)
    one.ref_count_down()
    try:
        said = pool.batched_allocate(page, torch.uint8, count)
    except OverflowError as error:
        said = error
    free = pool.address_manager.get_free_size() // 4096
    print(repr(count), "of 4 returns", said, "and leaves", free, "free, active", pool.num_active_allocations, end=", ")
    print("references of a freed page:", one.get_ref_count())
