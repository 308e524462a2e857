"""Rows of numbers as INT8 codes, with one scale per row."""

import numpy as np  # noqa: F401


class Rows:
    def quantize(self, rows, format):
        """Return codes (int8 [n, width]), scales (float32 [n]) and None, because this format has no zeros.

        rows: float32 [n, width].
        """
        raise NotImplementedError

    def dequantize(self, codes, scale, zero, width, format):
        """Return the values, as float32 [n, width]."""
        raise NotImplementedError
