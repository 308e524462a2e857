"""vLLM's BlockPool: a block that was freed twice is allocated while it is referenced, and a negative count."""

from vllm.v1.core.block_pool import BlockPool

touched, left, negative = (BlockPool(5, enable_caching=True, hash_block_size=16) for _ in range(3))  # a null block and four
for pool in (touched, left):
    (block,) = pool.get_new_blocks(1)
    for _ in range(2):
        pool.free_blocks([block])
    print("freed twice: references", block.ref_cnt)
    if pool is touched:
        pool.touch([block])  # as for a request with a hit
    try:
        print("referenced: block", block.block_id, "allocated to another:", [b.block_id for b in pool.get_new_blocks(4)])
    except AssertionError:
        print("then all are allocated: AssertionError, free", pool.get_num_free_blocks())

negative.get_new_blocks(2)
print("get_new_blocks(-3):", negative.get_new_blocks(-3), "free", negative.get_num_free_blocks(), "of 4")
try:
    negative.get_new_blocks(5)
except Exception as error:
    print("get_new_blocks(5):", type(error).__name__)
