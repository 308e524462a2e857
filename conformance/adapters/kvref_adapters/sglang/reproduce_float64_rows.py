"""SGLang's MHATokenToKVPool on a CPU: float64 keys and values, and float64 values with float32 keys."""

from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

one = torch.ones(1, 1, 1)
for keys, values in ((one.double(), one.double()), (one, one.double())):
    pool, said = MHATokenToKVPool(2, 1, torch.float32, 1, 1, 1, "cpu", enable_memory_saver=False), "nothing"
    try:
        pool.set_kv_buffer(SimpleNamespace(layer_id=0), torch.tensor([1]), keys, values)
    except RuntimeError as error:
        said = f"{str(error)[:70]}..."
    print(keys.dtype, values.dtype, "raised", said, "and contains", *(each.flatten().tolist() for each in pool.get_kv_buffer(0)))
