"""Rows of numbers as INT8 codes, with one scale per row."""

import numpy as np


class Rows:
    def quantize(self, rows, format):
        """Return codes (int8 [n, width]), scales (float32 [n]) and None, because this format has no zeros.

        rows: float32 [n, width].
        """
        largest = np.abs(rows).max(axis=1, initial=0)
        scale = np.maximum(largest / np.float32(127), np.float32(2**-23))
        quotient = rows / scale[:, None]
        # Adding 0.5 could itself round up, so the fraction is compared with a half.
        magnitude = np.abs(quotient)
        whole = np.floor(magnitude)
        codes = np.sign(quotient) * (whole + (magnitude - whole >= 0.5))
        return np.clip(codes, -127, 127).astype(np.int8), scale, None

    def dequantize(self, codes, scale, zero, width, format):
        """Return the values, as float32 [n, width]."""
        return codes.astype(np.float32) * scale[:, None]
