"""Queries for checks of attention, and the expected outputs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kvref_conformance.calls.derived_operations import require_unsplit_error
from kvref_conformance.calls.messages import error_kinds, format_value, to_call_error
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.attention import attention as of_float32
from kvref_conformance.oracle.attention import other_convention, output_rounding, weight_rounding
from kvref_conformance.oracle.formats import ROTATED_FORMATS
from kvref_conformance.oracle.formats.hadamard_rotation import block_of
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.oracle.formats.small_floats import round_to

# Key values: for the visible tokens at the ends of a range, and for the hidden tokens just past them.
LOUD_FACTOR, LOUDER_FACTOR = 2.0, 4.0
LOUD_SCALE = 40.0  # the softmax scale at which a key of LOUD_FACTOR dominates all others, and LOUDER_FACTOR dominates it


def normal_rows(subject: Subject, *shape: int) -> NDArray:
    """Normally distributed float32 values that are exact in the subject's dtype."""
    return round_to(subject.rng.normal(size=shape).astype(np.float32), subject.dtype)


class AttentionOutput(np.ndarray):
    """An expected output of attention. explain: returns a note about a wrong output, or ""; a part of the array has no notes."""

    explain: Callable[[NDArray], str] = staticmethod(lambda got: "")


def expected_attention(
    subject: Subject, query: NDArray, keys: NDArray, values: NDArray, **options: Any
) -> tuple[NDArray, NDArray]:
    """The expected output and its error bound, which includes the rounding of the result to the subject's dtype.

    It also includes the rounding of the weights, if the limits permit that.
    """
    want, bound = of_float32(query, keys, values, **options)
    if subject.limits.switch(subject.family, "rounded_weights"):
        bound = bound + weight_rounding(query, keys, values, subject.limits.dtypes(subject.family)[0], **options)
    output = want.view(AttentionOutput)
    output.explain = partial(other_convention, query, keys, values, **options)
    return output, bound + output_rounding(want, bound, subject.dtype)


def random_queries(subject: Subject, count: int) -> NDArray:
    """Queries float32 [count, query heads, dim], with two query heads per kv head if the limits allow it."""
    return normal_rows(subject, count, subject.heads * subject.size("group_size", 2), subject.dim)


def default_scale(subject: Subject) -> float:
    """A softmax scale at which no token dominates all others, whatever the head_dim."""
    return 2.5 / subject.dim


def unstated_scale(subject: Subject) -> float:
    """The scale of an attention call without one: 1 / sqrt(head_dim)."""
    return float(subject.dim**-0.5)


def keys_loud_at_view_ends(count: int, heads: int, dim: int, views: Sequence[NDArray]) -> NDArray:
    """Keys float32 [count, heads, dim] for which attention changes clearly if a view has one token too many or too few.

    views: arrays of the positions that a query must see. Element i of the keys is for view i: the query for it is 1 at element i
    and 0 elsewhere (`one_hot_queries`), at LOUD_SCALE. Visible tokens next to a hidden one have LOUD_FACTOR there, the hidden
    neighbors LOUDER_FACTOR. If a hidden neighbor is visible by mistake, it dominates the output.
    """
    keys = np.zeros((count, heads, dim), np.float32)
    for element, view in enumerate(views):
        near = {*view.tolist()}
        past = {at + side for at in near for side in (-1, 1) if 0 <= at + side < count} - near
        keys[[at for at in near if {at - 1, at + 1} - near], :, element] = LOUD_FACTOR
        keys[list(past), :, element] = LOUDER_FACTOR
    return keys


def one_hot_queries(elements: Sequence[int | None], heads: int, dim: int) -> NDArray:
    """Queries float32 [n, heads, dim]: row n is 1 at element elements[n] and 0 elsewhere; for None it is 0 everywhere."""
    query = np.zeros((len(elements), heads, dim), np.float32)
    for row, element in enumerate(elements):
        if element is not None:
            query[row, :, element] = 1.0
    return query


# Assertions for checks: each raises ClauseViolation with the expected and the actual value.
#
# The parameter `got` is a result of an implementation, which may be any object, so its type is Any.


def assert_equal(got: Any, want: Any, what: str) -> None:
    """Raise ClauseViolation unless two plain values (numbers, strings, lists of integers) are equal."""
    got = got.item() if isinstance(got, np.ndarray) and got.ndim == 0 else got
    if got != want:
        raise ClauseViolation(what, format_value(want), format_value(got))


def assert_true(condition: Any, what: str, expected: str, got: Any) -> None:
    """Raise ClauseViolation unless the condition is true."""
    if not condition:
        raise ClauseViolation(what, expected, format_value(got))


def assert_shape(got: Any, shape: tuple[int, ...], what: str) -> NDArray:
    """The result as an array. Raises ClauseViolation if its shape is another, or if it is float64."""
    array = np.asarray(got)
    if isinstance(got, np.ndarray) and got.dtype == np.float64:  # converting it to float32 here would hide missing rounding
        raise ClauseViolation(what, "float32 or a narrower float", "float64")
    if array.shape != tuple(shape):
        raise ClauseViolation(what, f"shape {list(shape)}", f"shape {list(array.shape)}")
    return array


def assert_same(got: Any, want: NDArray | np.generic, what: str) -> None:
    """Raise ClauseViolation unless two arrays have the same shape and the same bits. All NaNs are equal; -0 and 0 differ."""
    want = np.asarray(want)
    got = assert_shape(got, want.shape, what)
    if want.dtype.kind == "f":
        if got.dtype.kind != "f":
            raise ClauseViolation(what, "float32 or a narrower float", str(got.dtype))
        want, got = want.astype(np.float32), got.astype(np.float32)
        differs = (got.view(np.uint32) != want.view(np.uint32)) & ~(np.isnan(got) & np.isnan(want))
    else:
        differs = got != want
    _raise_at(differs, got, want, what, "")


def assert_within(got: Any, want: ArrayLike, bound: ArrayLike, what: str) -> None:
    """Raise ClauseViolation unless |got - want| <= bound for each element, computed in float64, or both are the same infinity."""
    explain = want.explain if isinstance(want, AttentionOutput) else AttentionOutput.explain
    want = np.asarray(want, dtype=np.float64)
    got = assert_shape(got, want.shape, what)
    bound = np.broadcast_to(np.asarray(bound, dtype=np.float64), want.shape)
    differs = ~((np.abs(got.astype(np.float64) - want) <= bound) | (got == want))
    _raise_at(differs, got, want, what, " within {}", bound, note=explain(got) if differs.any() else "")


def assert_pair(got: Any, want: tuple[NDArray, NDArray], what: str) -> None:
    """Raise ClauseViolation unless keys and values are the same to the bit."""
    assert_same(got[0], want[0], f"keys of {what}")
    assert_same(got[1], want[1], f"values of {what}")


def assert_reads(subject: Subject, got: Any, want: tuple[ExpectedReads, ExpectedReads], what: str, format: str = "") -> None:
    """Apply `assert_read` to keys and values."""
    for name, part, wanted in zip(("keys", "values"), got, want, strict=True):
        assert_read(subject, part, wanted, f"{name} of {what}", format)


def assert_read(subject: Subject, got: Any, want: ExpectedReads, what: str, format: str = "") -> None:
    """Raise ClauseViolation unless the result equals the oracle's: to the bit, or within its slack if the level is tolerant.

    At level tolerant, the error of each block of a rotated format is limited too (FMT-ROT-05).
    """
    if subject.level == "exact":
        assert_same(got, want.values, what)
    else:
        assert_within(got, want.values, want.slack, what)
        if format in ROTATED_FORMATS and want.values.size:
            assert_within_norm(got, want.values, want.slack, what)


def assert_within_norm(got: Any, want: NDArray, bound: NDArray, what: str) -> None:
    """Raise ClauseViolation unless the l2 norm of the error of each rotated block is at most the largest bound in it
    (FMT-ROT-05).
    """
    block = block_of(want.shape[-1])
    length = np.linalg.norm((np.asarray(got).astype(np.float64) - want).reshape(-1, block), axis=1)
    most = np.asarray(bound, np.float64).reshape(-1, block).max(axis=1)
    _raise_at(~(length <= most), length, np.zeros(length.shape), f"error norms of the blocks of {what}", " within {}", most)


class KeptResults:
    """Results as the implementation returned them, without conversion, each with a copy of its first contents."""

    def __init__(self, subject: Subject) -> None:
        """Raises NotOffered if the implementation runs in another process, which sends copies."""
        subject.require_same_process()
        self.subject = subject
        self.kept: list[tuple[str, Any, NDArray]] = []

    def add(self, what: str, result: Any) -> None:
        """Keep a result: an array or a sequence of integers, or a tuple of them."""
        several = isinstance(result, tuple) and not all(isinstance(each, Integral) for each in result)
        for number, part in enumerate(result if several else (result,)):
            name = f"result {number} of {what}" if several else f"the result of {what}"
            self.kept.append((name, part, self._copy(part)))

    def assert_unchanged(self) -> None:
        """Raise ClauseViolation if a result is no longer what it was (LAW-17)."""
        for name, result, before in self.kept:
            assert_same(self._copy(result), before, f"{name}, after later calls")

    def _copy(self, result: Any) -> NDArray:
        return np.array(result, np.int64) if isinstance(result, Sequence) else np.array(self.subject.numpy(result))


@contextmanager
def blaming(clause: str) -> Iterator[None]:
    """Let a ClauseViolation of the block name this clause instead of that of the check, unless it names one itself.

    For what a check needs before it can judge its own clause.
    """
    try:
        yield
    except ClauseViolation as violation:
        violation.clause = violation.clause or clause
        raise


@contextmanager
def may_raise(kind: str) -> Iterator[None]:
    """Raise ClauseViolation unless the block raises an error of this kind, or none."""
    try:
        yield
    except (NotOffered, ClauseViolation):
        raise
    except Exception as error:
        require_unsplit_error(error)
        if kind not in error_kinds(error):
            raise ClauseViolation("", f"{kind} or no error", f"{type(error).__name__}: {to_call_error(error).message}") from error


@contextmanager
def raises(*kinds: str) -> Iterator[None]:
    """Raise ClauseViolation unless the block raises an error of one of these kinds (class names, as in kvref.errors)."""
    wanted = "an error" if kinds == ("Exception",) else " or ".join(kinds)
    try:
        yield
    except (NotOffered, ClauseViolation):
        raise
    except Exception as error:
        require_unsplit_error(error)
        if not set(kinds) & set(error_kinds(error)):
            raise ClauseViolation(
                "", f"{wanted} to be raised", f"{type(error).__name__}: {to_call_error(error).message}"
            ) from error
    else:
        raise ClauseViolation("", f"{wanted} to be raised", "no error")


def _raise_at(differs: NDArray, got: NDArray, want: NDArray, what: str, suffix: str, *details: NDArray, note: str = "") -> None:
    if not differs.any():
        return
    if want.size <= 8:
        raise ClauseViolation(what, format_value(want) + suffix.format(*map(format_value, details)), format_value(got) + note)
    index = tuple(int(i) for i in np.argwhere(differs)[0])
    at = f"{what}[{', '.join(map(str, index))}] ({int(differs.sum())} of {differs.size} differ)"
    one = [repr(float(each[index])) for each in details]
    raise ClauseViolation(at, repr(want[index].item()) + suffix.format(*one), repr(got[index].item()) + note)
