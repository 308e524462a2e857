"""The two nibbles of a byte of Q5 are read as adjacent values, and so are the fifth bits. A row of zeros hides both mistakes."""

from typing import Any

import numpy as np

import kvref
from kvref_conformance.implementations.backends import Rows as RightRows
from kvref_zoo.right import Right


class Rows(RightRows):
    def dequantize(self, codes: Any, scale: Any, zero: Any, width: int, format: str) -> Any:
        if format not in ("q5_0", "q5_1"):
            return super().dequantize(codes, scale, zero, width, format)
        blocks = np.array(codes).reshape(len(codes), width // 32, -1)
        fifths = blocks[:, :, -20:-16]  # before the 16 bytes of nibbles
        bits = np.unpackbits(fifths, axis=2, bitorder="little")
        blocks[:, :, -20:-16] = np.packbits(
            np.concatenate([bits[:, :, ::2], bits[:, :, 1::2]], axis=2), axis=2, bitorder="little"
        )
        values = super().dequantize(blocks.reshape(np.shape(codes)), scale, zero, width, format)
        return np.asarray(values).reshape(len(codes), -1, 2, 16).swapaxes(2, 3).reshape(values.shape)


class Implementation(Right):
    clause = "FMT-GGML-01"
    also = ("FMT-GGML-06", "FMT-LEVEL-01", "FMT-LEVEL-03")
    bug = "paiml/aprender#1656"

    def rows(self) -> Rows:
        return Rows(kvref.reference)
