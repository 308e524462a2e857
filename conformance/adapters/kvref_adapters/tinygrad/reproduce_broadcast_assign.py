"""tinygrad's assign: a row of one head is assigned to two heads."""

import os

os.environ["DEV"] = "PYTHON"

from tinygrad import Tensor

cache = Tensor.zeros(1, 2, 3, 1).contiguous().realize()  # [batch, heads, tokens, head_dim]
cache[:, :, 0:1].assign(Tensor([[[[7.0]]]])).realize()
print(cache.flatten().tolist())
