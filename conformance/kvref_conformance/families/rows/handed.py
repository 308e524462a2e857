"""Rows as an implementation takes them: of a width that it has, in numbers that the dtype handed in holds."""

from collections.abc import Sequence

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.setup import few, held
from kvref_conformance.conversation.subject import Subject, narrow
from kvref_conformance.oracle import adversarial as oracle
from kvref_conformance.oracle.elements import MAX
from kvref_conformance.oracle.formats import group_of
from kvref_conformance.outcome import NotOffered

NEAR = 1.6040714e37 / 3.4028235e38, 2.9434131e34 / 3.4028235e38  # of the largest number: where what is read back overflows


def formats_of_rows(subject: Subject, *wanted: str) -> list[str]:
    """Those of some formats that it has, and a width for; of the many of FMT-GROUP a few, other ones each time."""
    found = [name for name in subject.formats(*wanted) if subject.size("width", group_of(name)) % group_of(name) == 0]
    if not found:
        raise NotOffered(f"rows of a width that is a multiple of {min(map(group_of, subject.formats(*wanted)))}")
    return few(subject, found)


def widths(subject: Subject, *wanted: int, format: str = "") -> list[int]:
    """The allowed widths of rows that are nearest to these, each a multiple of the format's groups."""
    group = group_of(format)
    found = dict.fromkeys(subject.size("width", -(-each // group) * group) for each in wanted)
    return [width for width in found if width % group == 0]


def taken(subject: Subject, rows: NDArray) -> NDArray:
    """Rows in numbers that the dtype handed in holds, without those that overflow there."""
    narrow = held(subject, rows)
    return narrow[np.isfinite(narrow).all(axis=1)]


def spread(subject: Subject, rows: NDArray, format: str = "") -> NDArray:
    """Rows brought to the allowed width nearest to theirs: their numbers over and over, or the first of them."""
    (width,) = widths(subject, rows.shape[1], format=format)
    return taken(subject, rows[:, np.arange(width) % rows.shape[1]])


def rows_of(subject: Subject, first: Sequence[float], numbers: NDArray, width: int) -> NDArray:
    """Rows of about this width that each begin with `first`, and among them go through the numbers."""
    subject.need(width=len(first) + 1)
    room = subject.size("width", width) - len(first)
    count = -(-len(numbers) // room)
    return taken(subject, np.concatenate([np.tile(first, (count, 1)), np.resize(numbers, (count, room))], axis=1))


def adversarial(subject: Subject, width: int, format: str) -> NDArray:
    """The oracle's rows of about this width, as they are taken."""
    (width,) = widths(subject, width, format=format)
    return taken(subject, oracle.adversarial(subject.rng, width, format))


def toward_zero(subject: Subject, rows: NDArray) -> NDArray:
    """The next number of the dtype handed in."""
    dtype = np.float32 if subject.dtype == "float32" else narrow(subject.dtype)
    next_ones: NDArray = np.nextafter(rows.astype(dtype), np.zeros_like(rows, dtype)).astype(np.float32)
    return next_ones


def largest(subject: Subject) -> float:
    """The largest number that can be handed in."""
    return MAX.get(subject.dtype, float(np.finfo(np.float32).max))
