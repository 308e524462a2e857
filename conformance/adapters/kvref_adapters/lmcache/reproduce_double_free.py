"""LMCache's allocators: an object that is freed twice, and one that is referenced after it was freed."""

import torch
from lmcache.v1.memory_allocators.paged_tensor_memory_allocator import PagedTensorMemoryAllocator
from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator

page, memory = torch.Size([4096]), torch.zeros(4 * 4096, dtype=torch.uint8)
for make in (lambda: PagedTensorMemoryAllocator(memory, [page], [torch.uint8]), lambda: TensorMemoryAllocator(memory)):
    pool = make()
    held = [pool.allocate(page, torch.uint8) for _ in range(4)]
    for _ in range(2):
        held[0].ref_count_down()
    print(pool, "free", pool.address_manager.get_free_size() // 4096, "active", pool.num_active_allocations)
    one, two = (pool.allocate(page, torch.uint8) for _ in range(2))
    print("two owners of one page:", one is two, "of", [each and each.meta.address for each in (one, two)])
    held[1].ref_count_down()
    held[1].ref_count_up()
    other = pool.allocate(page, torch.uint8)
    other.tensor.fill_(7)
    print("freed, referenced: references", held[1].get_ref_count(), "and reads", bytes(held[1].byte_array)[0], "of another")
