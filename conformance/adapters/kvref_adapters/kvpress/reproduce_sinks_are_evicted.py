"""kvpress: the second compression of a DecodingPress with a StreamingLLMPress evicts the sink tokens.

pip install torch transformers kvpress
"""

from types import SimpleNamespace

import torch
from kvpress import DecodingPress, StreamingLLMPress

press = DecodingPress(StreamingLLMPress(n_sink=4))  # by default to 2048 tokens, every 512
attention = SimpleNamespace(head_dim=1)
count = press.target_size
keys = torch.arange(count, dtype=torch.float32).reshape(1, 1, count, 1)  # each key is its position
for compression in range(1, 4):
    new = torch.arange(count, count + press.compression_interval, dtype=torch.float32).reshape(1, 1, -1, 1)
    count += press.compression_interval
    keys = torch.cat([keys, new], dim=2)  # what DynamicCache.update does
    keys, _ = press.compress(attention, None, keys, keys, None, {})
    stored = keys.flatten().int().tolist()
    sinks = [position for position in range(4) if position in stored]
    recent = sum(position in stored for position in range(count - press.target_size + 4, count))
    print(
        f"compression {compression}: sinks {sinks}, {recent} of the {len(stored) - 4} newest; order of the keys: {stored[:4]} ..."
    )
