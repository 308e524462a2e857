"""mlx 0.32.4: one end of a group can be cut off; bfloat16 scales are rounded after the codes are computed."""

import mlx.core as mx

mx.set_default_device(mx.cpu)
row = mx.tile(mx.array([[1.0, -1.0, 0.3, -0.2]]), (1, 16))
print(mx.dequantize(*mx.quantize(row, 64, 2), 64, 2)[0, :4].tolist())
rows = mx.random.normal((4000, 64), key=mx.random.key(0)).astype(mx.bfloat16)
words, scale, bias = mx.quantize(rows, 64, 8)
rows, codes, scale, bias = (each.astype(mx.float32) for each in (rows, words.view(mx.uint8), scale, bias))
nearest = mx.clip(mx.round((rows - bias) / scale), 0, 255)
read = mx.dequantize(words, scale.astype(mx.bfloat16), bias.astype(mx.bfloat16), 64, 8).astype(mx.float32)
for values in (read, codes * scale + bias, nearest * scale + bias):
    print(f"{mx.sqrt(((values - rows) ** 2).mean()).item():.5f}")
