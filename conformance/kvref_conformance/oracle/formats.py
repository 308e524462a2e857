"""The formats by what they can do, as the oracle knows them."""

PLAIN = ("float32", "float16", "bfloat16")
SYMMETRIC = ("int8", "float8_e4m3fn", "float8_e5m2")
AFFINE = ("q8", "q4")
