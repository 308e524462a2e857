"""transformers' mask of continuous batching: how many tokens each query of one step sees, per window."""

import torch
from transformers.generation.continuous_batching.utils import build_attention_mask

for window in (1, 2):
    mask = torch.empty(1, 1, 3, 3)
    build_attention_mask(mask, [0, 3], [0, 3], window)
    print("a window of", window, "sees", [(row == 0).sum().item() for row in mask[0, 0]])
