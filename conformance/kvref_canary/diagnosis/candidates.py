"""The search for wrong digits: finds the sequences, and the shifts within them, that are worth a replay."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvref_canary.diagnosis.case import Case, RequestHistory

MAX_SHIFTS = 24  # wrong tokens
MAX_MATCHES = 5
MIN_BITS = 7.0  # bits: at most one of 2 ** 7 random tokens is attributed to a sequence
BLOCK_TOKENS = 8  # smallest block size
LIKELY_SHIFT = 16  # most common block size


@dataclass(frozen=True)
class ShiftedMatch:
    """Wrong digits of the first `count` wrong tokens, found `shift` positions after those that should have been read."""

    source: RequestHistory
    shift: int
    count: int
    bits: float

    def selection_cost(self, case: Case) -> float:
        """Bits to select this run among all sequences and shifts."""
        return naming_cost(case, self.source, self.shift)


def naming_cost(case: Case, source: RequestHistory, shift: int) -> float:
    if shift == 0:
        far = 0.0
    elif abs(shift) == 1:
        far = 2.0
    else:
        far = math.log2(2 * case.length / (BLOCK_TOKENS if shift % BLOCK_TOKENS == 0 else 1))
    return far + math.log2(1 + len(case.others))


def shifted_matches(case: Case) -> list[ShiftedMatch]:
    """Return the runs worth more bits than they cost, longest first. A run within this request has a shift other than 0."""
    found = [run for history in (case.request, *case.others) for run in _matches_in(case, history)]
    found = sorted(
        (run for run in found if run.bits >= run.selection_cost(case) + MIN_BITS),
        key=lambda run: run.selection_cost(case) - run.bits,
    )
    if case.canary.recalls and not found:
        found = sorted(
            (run for history in case.others for run in _permuted_matches_in(case, history)),
            key=lambda run: run.selection_cost(case) - run.bits,
        )
    return found[:MAX_MATCHES]


def _matches_in(case: Case, history: RequestHistory) -> Iterator[ShiftedMatch]:
    tokens = np.array(case.tokens if history is case.request else list(history.tokens))
    wrong = [number for number in case.wrong if case.sources[number] >= 0 and case.wrong_digits[number].any()][:MAX_SHIFTS]
    if not wrong or len(tokens) == 0:
        return
    held = np.array([case.canary.digits(int(token)) for token in tokens])
    lowest = -int(case.sources[wrong].max())
    shifts = np.arange(lowest, len(tokens) - int(case.sources[wrong].min()))
    places = case.sources[wrong][:, None] + shifts  # [wrong, shifts]
    ends = case.queries[wrong] + 1 if history is case.request else np.full(len(wrong), len(tokens))  # no later ones are read
    there = (places >= 0) & (places < ends[:, None])
    digits = held[np.where(there, places, 0)]  # [wrong, shifts, heads]
    same = there & ((digits == case.digits[wrong][:, None]) | ~case.wrong_digits[wrong][:, None]).all(axis=2)
    counts = np.logical_and.accumulate(same, axis=0).sum(axis=0)
    bits = _digit_bits(case, wrong)
    for number in np.lexsort((np.abs(shifts), -counts))[:MAX_MATCHES]:
        shift, count = int(shifts[number]), int(counts[number])
        if count and not (shift == 0 and history is case.request):
            yield ShiftedMatch(history, shift, count, float(bits[:count].sum()))


def _digit_bits(case: Case, wrong: list[int]) -> NDArray[np.float64]:
    return np.asarray(case.canary.bits * case.wrong_digits[wrong].sum(axis=1), np.float64)


def _permuted_matches_in(case: Case, history: RequestHistory) -> Iterator[ShiftedMatch]:
    """Yield shifts at which the block of most right digits becomes one with the wrong digits, in any order (similar keys)."""
    due = case.sources[case.wrong]
    known = [number for number in case.wrong if case.wrong_digits[number].any()]
    if not (due >= 0).any() or not known or not history.tokens:
        return
    blocks, counts = np.unique(due[due >= 0] // LIKELY_SHIFT, return_counts=True)
    start = int(blocks[counts.argmax()]) * LIKELY_SHIFT
    digits = np.array([case.canary.digits(token) for token in history.tokens])
    for shift in range(-start, len(digits) - start, BLOCK_TOKENS):
        held = digits[start + shift : start + shift + LIKELY_SHIFT]
        there = [number for number in known if (held == case.digits[number]).all(axis=1).any()]
        if there and (shift == 0 or len(there) > 1):
            bits = len(there) * (case.canary.bits * case.canary.num_kv_heads - math.log2(LIKELY_SHIFT))
            yield ShiftedMatch(history, shift, len(there), bits)
