"""Bugs in kernels with half precision, heads of 64 or 128 and blocks of 16."""

from typing import Any

import numpy as np

from api_subsets import kernel_attention, kernel_paged
from api_subsets.breaking import breaks
from api_subsets.kernel_attention import Attention, KernelAttention
from api_subsets.kernel_paged import KernelPaged
from api_subsets.paged import Sequence


@breaks("ATTN-01", KernelAttention)
class HeadsAreInterleaved(kernel_attention.Attention):
    def group(self, head: int, query_heads: int, kv_heads: int) -> int:
        return head % kv_heads


@breaks("ATTN-03", KernelAttention)
class ScoresAreHalfPrecision(kernel_attention.Attention):
    def one(self, query: Any, keys: Any, values: Any, scale: float) -> Any:
        with np.errstate(over="ignore", invalid="ignore"):
            scores = (keys @ query * np.float16(scale)).astype(np.float32)
            weights = np.exp(scores - scores.max())
            return weights @ values.astype(np.float32) / weights.sum()


@breaks("ATTN-03", KernelAttention)
class TheLargestScoreIsNotSubtracted(kernel_attention.Attention):
    def one(self, query: Any, keys: Any, values: Any, scale: float) -> Any:
        with np.errstate(over="ignore", invalid="ignore"):
            weights = np.exp(keys.astype(np.float32) @ query.astype(np.float32) * np.float32(scale))
            return weights @ values.astype(np.float32) / weights.sum()


@breaks("ATTN-04", KernelAttention)
class SumsAreHalfPrecision(kernel_attention.Attention):
    def one(self, query: Any, keys: Any, values: Any, scale: float) -> Any:
        with np.errstate(over="ignore", invalid="ignore"):
            scores = keys.astype(np.float32) @ query.astype(np.float32) * np.float32(scale)
            weights = np.exp(scores - scores.max()).astype(np.float16)
            total, output = np.float16(0), np.zeros(values.shape[1], np.float16)
            for weight, value in zip(weights, values, strict=True):
                total, output = total + weight, output + weight * value
            return output / total


@breaks("ATTN-05", KernelAttention)
class WeightsSumToLess(kernel_attention.Attention):
    def one(self, query: Any, keys: Any, values: Any, scale: float) -> Any:
        return super().one(query, keys, values, scale) * np.float32(0.875)


@breaks("ATTN-07", KernelAttention)
class WhatIsMaskedIsMultipliedByZero(kernel_attention.Attention):
    def attend(self, query: Any, keys: Any, values: Any, scale: float, causal: bool, length: int) -> Any:
        with np.errstate(invalid="ignore"):
            hidden = (values[length:].astype(np.float32) * 0).sum(axis=0)
            right = super().attend(query, keys, values, scale, causal, length)
            return right + np.repeat(hidden, query.shape[1] // keys.shape[1], axis=0)


@breaks("ATTN-08", KernelAttention)
class NoTokensGiveNan(kernel_attention.Attention):
    def attend(self, query: Any, keys: Any, values: Any, scale: float, causal: bool, length: int) -> Any:
        right = super().attend(query, keys, values, scale, causal, length)
        return right if length else np.full_like(right, np.nan)


@breaks("ATTN-09", KernelAttention)
class TheMasksCornerIsTheFirstToken(kernel_attention.Attention):
    """Right for a prompt in one chunk; a later chunk sees what the first would."""

    def seen(self, row: int, queries: int, causal: bool, length: int) -> int:
        return min(row + 1, length) if causal else length


@breaks("PAGED-06", KernelPaged)
class TheSixteenthSlotIsInTheNextBlock(kernel_paged.Cache):
    def slot_mapping(self, sequence: int, layer: int, start: int, count: int) -> list[int]:
        right = super().slot_mapping(sequence, layer, start, count)
        table = self.found(sequence).tables[layer]
        return [table[p // 16 + 1] * 16 if p % 16 == 15 and p // 16 + 1 < len(table) else slot
                for p, slot in enumerate(right, start)]  # fmt: skip


@breaks("PAGED-12", KernelPaged)
class TheEdgeOfABlockIsReadFromTheLast(kernel_paged.Cache):
    """Off by one at position 16, which is read from the block before."""

    def read(self, sequence: int, layer: int, positions: Any) -> tuple[Any, Any]:
        return super().read(sequence, layer, [p - 16 if p and p % 16 == 0 else p for p in positions])


@breaks("PAGED-16", KernelPaged)
class ABatchIsWrittenUntilOneFails(kernel_paged.Cache):
    def append_to(self, sequences: Any, layers: list[int], keys: Any, values: Any) -> None:
        for column, sequence in enumerate(sequences):
            super().append_to([sequence], layers, keys[:, column : column + 1], values[:, column : column + 1])


@breaks("PAGED-16", KernelPaged)
class ABatchGoesByRow(kernel_paged.Cache):
    """Row i of a batch is written to the i-th live sequence, whatever the batch names."""

    def append(self, sequences: Any, layer: int, keys: Any, values: Any) -> None:
        for sequence in sequences:
            self.found(sequence)
        there = sorted(self.sequences)
        named = there[: len(sequences)] if len(set(sequences)) == len(sequences) <= len(there) else sequences
        super().append(named, layer, keys, values)


@breaks("PAGED-17", KernelPaged)
class TablesAreFilledUpWithZero(kernel_paged.Cache):
    def block_tables(self, sequences: Any, layer: int) -> Any:
        return np.maximum(super().block_tables(sequences, layer), 0)


@breaks("PAGED-17", KernelPaged)
class OffsetsLackTheTotal(kernel_paged.Cache):
    def gather_batch(self, sequences: Any, layer: int) -> tuple[Any, Any, Any]:
        keys, values, offsets = super().gather_batch(sequences, layer)
        return keys, values, offsets[:-1] if len(sequences) else offsets


@breaks("ATTN-10", KernelPaged)
class AttentionIsOverTheRoomInTheBlocks(kernel_paged.Cache):
    def attend(self, sequence: int, layer: int, query: Any, scale: float) -> Any:
        table = self.found(sequence).tables[self.layer(layer)]
        at = self.places(table, np.arange(len(table) * 16))
        return Attention().attention(query, self.keys[at], self.values[at], scale=scale, causal=False, length=len(table) * 16)


@breaks("PAGED-11", KernelPaged)
class AWholeBlockIsWritten(kernel_paged.Cache):
    """Overwriting pads with zeros to the end of the block."""

    def store(self, found: Sequence, layer: int, positions: Any, keys: Any, values: Any) -> None:
        super().store(found, layer, positions, keys, values)
        if len(positions) and positions[-1] + 1 < found.lengths[layer] and keys.ndim == 3:
            rest = np.arange(positions[-1] + 1, -(-(positions[-1] + 1) // 16) * 16)
            blank = np.zeros((len(rest), *self.row), self.dtype)
            super().store(found, layer, rest, blank, blank)
