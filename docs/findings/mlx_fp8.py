"""MLX 0.32.4: to_fp8 makes 448 of what is no number, though from_fp8 knows the codes of NaN."""

import mlx.core as mx
import numpy as np

codes = mx.to_fp8(mx.array([np.nan, np.inf, -np.inf, 1e9]))
print(codes.tolist(), mx.from_fp8(codes, mx.float32).tolist())
print(mx.from_fp8(mx.array([0x7E, 0x7F, 0xFF], dtype=mx.uint8), mx.float32).tolist())
