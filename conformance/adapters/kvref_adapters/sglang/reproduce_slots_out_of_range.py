"""SGLang's MHATokenToKVPool on a CPU: slots of -1, past the end and in 2 dimensions, tokens of one head and of an extra axis."""

from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

square = [[1, 2], [3, 4]]
for slots, shape in (([2, -1], (2, 2, 1)), ([2, 9], (2, 2, 1)), ([2, 3], (2, 1, 1)), ([2, 3], (1, 2, 2, 1)), (square, (2, 2, 1))):
    pool = MHATokenToKVPool(4, 1, torch.float32, 2, 1, 1, "cpu", enable_memory_saver=False)
    tokens, said = torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape), "nothing"
    try:
        pool.set_kv_buffer(SimpleNamespace(layer_id=0), torch.tensor(slots), tokens, tokens)
    except Exception as error:
        said = f"{type(error).__name__}: {str(error)[:60]}"
    print(slots, shape, "raised", said, "and the keys are", pool.get_key_buffer(0).flatten().tolist())
