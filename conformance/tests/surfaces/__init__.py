"""Caches as other people write them: small, plain NumPy, and with no more operations than their users needed.

None of them knows kvref. They show that the judge meets such a cache where it is: each right one is judged on every clause that
its operations can show (test_surfaces.py), and each bug in broken_*.py is caught by the clause that it names.
"""

from typing import Any, ClassVar

import numpy as np


class Host:
    """What an implementation is beside its caches, on the host's own arrays."""

    version = "1"
    language = "python"
    level = "exact"
    limits: ClassVar[dict[str, Any]] = {}

    def asarray(self, values: Any) -> Any:
        return np.array(values, dtype=np.float32) if values.dtype.name == "bfloat16" else np.array(values)

    def to_numpy(self, array: Any) -> Any:
        return array
