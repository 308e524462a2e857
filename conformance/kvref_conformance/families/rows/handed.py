"""Rows as an implementation takes them: of a width that it has, in numbers that the dtype handed in holds."""

from collections.abc import Sequence

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.setup import held
from kvref_conformance.conversation.subject import Subject, narrow
from kvref_conformance.oracle import rows as oracle
from kvref_conformance.oracle.elements import MAX

NEAR = 1.6040714e37 / 3.4028235e38, 2.9434131e34 / 3.4028235e38  # of the largest number: where what is read back overflows


def widths(subject: Subject, *wanted: int) -> list[int]:
    """The allowed widths of rows that are nearest to these."""
    return list(dict.fromkeys(subject.size("width", each) for each in wanted))


def taken(subject: Subject, rows: NDArray) -> NDArray:
    """Rows in numbers that the dtype handed in holds, without those that overflow there."""
    narrow = held(subject, rows)
    return narrow[np.isfinite(narrow).all(axis=1)]


def spread(subject: Subject, rows: NDArray) -> NDArray:
    """Rows brought to the allowed width nearest to theirs: their numbers over and over, or the first of them."""
    width = subject.size("width", rows.shape[1])
    return taken(subject, rows[:, np.arange(width) % rows.shape[1]])


def rows_of(subject: Subject, first: Sequence[float], numbers: NDArray, width: int) -> NDArray:
    """Rows of about this width that each begin with `first`, and among them go through the numbers."""
    subject.need(width=len(first) + 1)
    room = subject.size("width", width) - len(first)
    count = -(-len(numbers) // room)
    return taken(subject, np.concatenate([np.tile(first, (count, 1)), np.resize(numbers, (count, room))], axis=1))


def adversarial(subject: Subject, width: int, format: str) -> NDArray:
    """The oracle's rows of about this width, as they are taken."""
    return taken(subject, oracle.adversarial(subject.rng, subject.size("width", width), format))


def toward_zero(subject: Subject, rows: NDArray) -> NDArray:
    """The next number of the dtype handed in."""
    dtype = np.float32 if subject.dtype == "float32" else narrow(subject.dtype)
    next_ones: NDArray = np.nextafter(rows.astype(dtype), np.zeros_like(rows, dtype)).astype(np.float32)
    return next_ones


def largest(subject: Subject) -> float:
    """The largest number that can be handed in."""
    return MAX.get(subject.dtype, float(np.finfo(np.float32).max))
