"""tinygrad's casts on its device PYTHON (before Python 3.12, where it emulates float16)."""

import os

os.environ["DEV"] = "PYTHON"

from tinygrad import Tensor, dtypes

print(Tensor([2.0**-14, 2.0**-15, 2.0**-24]).cast(dtypes.float16).realize().cast(dtypes.float32).tolist())
print(Tensor([57344.0, 61440.0, 1e9, float("inf")]).cast(dtypes.fp8e5m2).cast(dtypes.float32).tolist())
