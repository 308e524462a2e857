import numpy as np
from gguf import GGMLQuantizationType, quants

for zero in (0.0, -0.0):  # ggml itself writes the bytes of the first for both
    block = quants.quantize(np.full((1, 32), zero, np.float32), GGMLQuantizationType.Q4_0)
    print(zero, block[0].tolist()[:3])
