"""optimum-quanto 0.2.7: a weight of a single group gets one scale and one shift per number."""

import torch
from optimum.quanto import MaxOptimizer, qint4

for rows in (1, 2):
    scale, shift = MaxOptimizer()(torch.randn(rows, 64), qint4, axis=0, group_size=64)
    print(rows, list(scale.shape), list(shift.shape))
