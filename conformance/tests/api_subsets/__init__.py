"""Caches in the style of third-party code: small, plain NumPy, and with no more operations than their users need.

They do not import kvref. They show that the judge adapts to such a cache: each correct cache is judged on every clause that its
operations can show (test_api_subsets.py), and each bug in broken_*.py fails the clause that it names.
"""

from typing import Any, ClassVar

import numpy as np


class Host:
    """The attributes of an implementation besides its caches, for NumPy arrays."""

    version = "1"
    language = "python"
    level = "exact"
    limits: ClassVar[dict[str, Any]] = {}

    def asarray(self, values: Any) -> Any:
        return np.array(values, dtype=np.float32) if values.dtype.name == "bfloat16" else np.array(values)

    def to_numpy(self, array: Any) -> Any:
        return array
