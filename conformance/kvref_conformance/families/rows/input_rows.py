"""Rows that an implementation accepts: of an allowed width, with numbers that the dtype of its inputs can represent."""

from collections.abc import Sequence

import numpy as np

from kvref_conformance.calls.subject import Subject, narrow_dtype
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle import adversarial as oracle
from kvref_conformance.oracle.formats import group_of
from kvref_conformance.oracle.formats.small_floats import MAX
from kvref_conformance.testlib.fixtures import round_to_input_dtype, sample_formats

NEAR = 1.6040714e37 / 3.4028235e38, 2.9434131e34 / 3.4028235e38  # times the largest number: rows at the edge of overflow


def formats_of_rows(subject: Subject, *wanted: str) -> list[str]:
    """Returns the wanted formats that it provides with an allowed width, and of FMT-GROUP a random few."""
    return sample_formats(subject, all_formats_of_rows(subject, *wanted))


def all_formats_of_rows(subject: Subject, *wanted: str) -> list[str]:
    """Returns the wanted formats that it provides with an allowed width. Raises NotOffered if there are none."""
    found = [name for name in subject.formats(*wanted) if subject.size("width", group_of(name)) % group_of(name) == 0]
    if not found:
        raise NotOffered(f"rows of a width that is a multiple of {min(map(group_of, subject.formats(*wanted)))}")
    return found


def widths(subject: Subject, *wanted: int, format: str = "") -> list[int]:
    """Returns the allowed widths nearest to the wanted ones that are multiples of the format's group."""
    group = group_of(format)
    found = dict.fromkeys(subject.size("width", -(-each // group) * group) for each in wanted)
    return [width for width in found if width % group == 0]


def representable_rows(subject: Subject, rows: NDArray) -> NDArray:
    """Returns rows rounded to the dtype of the inputs, without rows that overflow it."""
    narrow = round_to_input_dtype(subject, rows)
    return narrow[np.isfinite(narrow).all(axis=1)]


def rows_of_allowed_width(subject: Subject, rows: NDArray, format: str = "") -> NDArray:
    """Returns rows of the nearest allowed width: repeated or cut."""
    (width,) = widths(subject, rows.shape[1], format=format)
    return representable_rows(subject, rows[:, np.arange(width) % rows.shape[1]])


def rows_containing(subject: Subject, first: Sequence[float], numbers: NDArray, width: int) -> NDArray:
    """Returns rows of the allowed width nearest to `width`: each begins with `first`, and together they contain all numbers."""
    subject.require_size(width=len(first) + 1)
    room = subject.size("width", width) - len(first)
    count = -(-len(numbers) // room)
    return representable_rows(subject, np.concatenate([np.tile(first, (count, 1)), np.resize(numbers, (count, room))], axis=1))


def adversarial(subject: Subject, width: int, format: str) -> NDArray:
    """Returns the oracle's adversarial rows at the nearest allowed width, in the dtype of the inputs."""
    (width,) = widths(subject, width, format=format)
    return representable_rows(subject, oracle.adversarial_rows(subject.rng, width, format))


def toward_zero(subject: Subject, rows: NDArray) -> NDArray:
    """Returns the next numbers toward zero in the dtype of the inputs."""
    dtype = np.float32 if subject.dtype == "float32" else narrow_dtype(subject.dtype)
    neighbors: NDArray = np.nextafter(rows.astype(dtype), np.zeros_like(rows, dtype)).astype(np.float32)
    return neighbors


def largest(subject: Subject) -> float:
    """Returns the largest finite number of the dtype of the inputs."""
    return MAX.get(subject.dtype, float(np.finfo(np.float32).max))
