"""vLLM's BlockPool: a block that was freed twice is handed out while it is held, and a negative number makes blocks."""

from vllm.v1.core.block_pool import BlockPool

pool = BlockPool(5, enable_caching=True, hash_block_size=16)  # the null block, and four more
(block,) = pool.get_new_blocks(1)
pool.free_blocks([block])
pool.free_blocks([block])
print("freed twice: references", block.ref_cnt)
pool.touch([block])  # as for a request that finds it
handed_out = [each.block_id for each in pool.get_new_blocks(4)]
print("held by a request: block", block.block_id, "handed out to another:", handed_out)

pool = BlockPool(5, enable_caching=True, hash_block_size=16)
pool.get_new_blocks(2)
print("get_new_blocks(-3):", pool.get_new_blocks(-3), "free", pool.get_num_free_blocks(), "of 4")
try:
    pool.get_new_blocks(5)
except Exception as error:
    print("get_new_blocks(5):", type(error).__name__)

pool = BlockPool(5, enable_caching=False, hash_block_size=16)
(block,) = pool.get_new_blocks(1)
pool.free_blocks([block])
pool.free_blocks([block])
try:
    print("freed twice, then all are taken:", pool.get_new_blocks(4))
except AssertionError:
    print("freed twice, then all are taken: AssertionError, free", pool.get_num_free_blocks())
