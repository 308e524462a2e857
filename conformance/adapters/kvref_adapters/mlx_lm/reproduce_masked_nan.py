"""MLX's attention on a CPU: NaN or infinity in a token that is masked for the first query."""

import mlx.core as mx

mx.set_default_device(mx.cpu)
ones = mx.ones((1, 1, 2, 1))
for name, number in (("NaN", float("nan")), ("infinity", float("inf"))):
    values = mx.array([7.0, number]).reshape(1, 1, 2, 1)
    out = mx.fast.scaled_dot_product_attention(ones, ones, values, scale=1.0, mask="causal")
    print("values 7 and", name, "give the first query", out[0, 0, 0].item())
