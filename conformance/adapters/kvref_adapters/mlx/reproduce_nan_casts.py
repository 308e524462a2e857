"""MLX: to_fp8 of NaN, and from_fp8 of the code of NaN."""

import mlx.core as mx

mx.set_default_device(mx.cpu)
codes = mx.to_fp8(mx.array([1.0, float("nan"), float("inf")]))
print([hex(code) for code in codes.tolist()], "read back as", mx.from_fp8(codes, mx.float32).tolist())
print("0x7f reads back as", mx.from_fp8(mx.array([0x7F], mx.uint8), mx.float32).tolist())
