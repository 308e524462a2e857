import numpy as np
from gguf import GGMLQuantizationType, quants

for zero in (0.0, -0.0):  # for both, ggml writes what quantize writes for 0.0
    block = quants.quantize(np.full((1, 32), zero, np.float32), GGMLQuantizationType.Q4_0)
    print(zero, block[0].tolist()[:3])
for second in (4, 8):  # a minimum of 0 and, later in the row, -0: ggml keeps the first
    row = np.ones((1, 32), np.float32)
    row[0, 0], row[0, second] = 0.0, -0.0
    print(second, quants.quantize(row, GGMLQuantizationType.Q4_1)[0].tolist()[2:4])
