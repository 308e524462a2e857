"""Values that an implementation may return for a number or an array."""

from typing import Any

import numpy as np
import pytest

import kvref
from kvref_conformance.drivers.reply_validation import to_plain_data
from kvref_conformance.exceptions import ClauseViolation
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.runner.check_runner import CheckRunner, select_checks, verdict_of


class Tensor:
    """A tensor of another library than NumPy."""

    def __init__(self, values):
        self.values = np.asarray(values)
        self.shape, self.dtype = self.values.shape, self.values.dtype


class Theirs(OnBackend):
    """Correct: accepts two kinds of arrays, and returns NumPy's numbers."""

    def __init__(self):
        super().__init__(kvref.reference)
        self.name = "theirs"

    def to_numpy(self, array):
        return array if type(array) is np.ndarray else array.values

    def paged(self, **config):
        class Cache(kvref.PagedCache):
            def length(self, sequence, layer):
                return np.int64(super().length(sequence, layer))

            def create(self):
                return np.int32(super().create())

            num_free_blocks = property(lambda self: np.uint8(self.pool.num_free))
            utilization = property(lambda self: np.float64(self.pool.utilization))

        return Cache(kvref.PagedConfig(**config))


def read(result, hint):
    return to_plain_data(Theirs(), result, hint, "a result")


@pytest.mark.parametrize(
    ("result", "hint", "expected"),
    [
        (np.int64(7), int, 7), (np.uint64(2**64 - 1), int, 2**64 - 1), (np.int8(1), float, 1.0), (np.float16(0.5), float, 0.5),
        (np.float32(0.5), float, 0.5), (np.float64(0.1), float, 0.1), (Tensor(7), int, 7), (Tensor(np.float32(0.5)), float, 0.5),
    ],
)  # fmt: skip
def test_a_number_may_be_numpys_or_the_librarys_own(result, hint, expected):
    found = read(result, hint)
    assert (type(found), found) == (hint, expected)


@pytest.mark.parametrize("result", [np.bool_(True), np.float32(7), Tensor(True), Tensor(7.0), Tensor([7])])
def test_what_is_no_integer_is_none_of_numpys_either(result):
    with pytest.raises(ClauseViolation, match="expected an integer"):
        read(result, int)


def test_an_array_without_axes_may_be_a_scalar_of_numpys():
    found = read(np.float32(0.5), Any)
    assert (type(found), found.shape, found.dtype) == (np.ndarray, (), np.float32)


@pytest.fixture(scope="module")
def judge():
    """One judge for all clauses, so that its state machine runs once."""
    return CheckRunner(Theirs())


@pytest.mark.parametrize("clause", ["PAGED-09", "PAGED-12", "PAGED-13"])
def test_a_cache_whose_numbers_are_numpys_is_right(judge, clause):
    ((_, checks),) = select_checks(clause, "paged").items()
    assert verdict_of(judge.judge_clause(checks)) == "passed"
