"""Expectations: what a reply must be. There is one class per kind of reply.

A model creates an Expectation for each request before the reply is known. `judge` raises ClauseViolation if the reply does not
satisfy it, with the clause that the wrong reply breaks.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvref_conformance.calls.messages import CallReply, format_value
from kvref_conformance.exceptions import ClauseViolation
from kvref_conformance.implementation_api import Level, NDArray, same_bits
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.oracle.formats.small_floats import decoded

CODED_DTYPES = ("float16", "bfloat16")
ClauseAt = Callable[[tuple[int, ...], NDArray], str]  # returns a clause for the index of the first difference and the array


@dataclass(frozen=True)
class Expectation:
    """Any result without an error; the base class of all expectations.

    clause: the clause that a wrong reply breaks. on_result: called with a correct result; it updates the model.
    """

    clause: str
    on_result: Callable[[Any], None] = lambda ok: None

    def judge(self, reply: CallReply, op: str, level: Level) -> None:
        """Raise ClauseViolation if the reply is wrong. Otherwise update the model."""
        if reply.error:
            raise ClauseViolation(op, self.describe(), f"{reply.error.kind}: {reply.error.message}", self.clause)
        self.compare(reply.ok, op, level)
        self.on_result(reply.ok)

    def describe(self) -> str:
        """What was expected, for the message if an error was raised instead."""
        return "no error"

    def compare(self, ok: Any, op: str, level: Level) -> None:
        """Raise ClauseViolation if the result is wrong."""

    def to_json(self) -> dict[str, Any]:
        """The expectation as JSON, for a trace."""
        return {"ok": None}


@dataclass(frozen=True)
class UnjudgedReply(Expectation):
    """Any result, which is not compared."""

    def to_json(self) -> dict[str, Any]:
        return {"any": True}


@dataclass(frozen=True)
class ExpectedError(Expectation):
    """An error of one of these kinds. on_error: called if the error was correct; it updates the model."""

    kinds: tuple[str, ...] = ()
    on_error: Callable[[], None] = lambda: None

    def judge(self, reply: CallReply, op: str, level: Level) -> None:
        if not (reply.error and reply.error.kind in self.kinds):
            got = f"{reply.error.kind}: {reply.error.message}" if reply.error else "no error"
            raise ClauseViolation(op, self.describe(), got, self.clause)
        self.on_error()

    def describe(self) -> str:
        return " or ".join(self.kinds) + " to be raised"

    def to_json(self) -> dict[str, Any]:
        return {"error": {"kinds": list(self.kinds)}}


@dataclass(frozen=True)
class AcceptedOrError(ExpectedError):
    """Any result, or an error of one of these kinds (default NonFinite, LAW-14)."""

    kinds: tuple[str, ...] = ("NonFinite",)

    def judge(self, reply: CallReply, op: str, level: Level) -> None:
        if reply.error:
            super().judge(reply, op, level)
        else:
            self.compare(reply.ok, op, level)
            self.on_result(reply.ok)

    def describe(self) -> str:
        return " or ".join([*self.kinds, "no error"])

    def to_json(self) -> dict[str, Any]:
        return super().to_json() | {"any": True}


@dataclass(frozen=True)
class ExpectedOrError(AcceptedOrError):
    """The expected result, or an error of one of these kinds."""

    expected: Expectation = Expectation("")

    def compare(self, ok: Any, op: str, level: Level) -> None:
        self.expected.compare(ok, op, level)


@dataclass(frozen=True)
class ExactValue(Expectation):
    """A number, a string or statistics. It must be equal; a float only within the rounding of float32.

    clauses: the clauses of single statistics, which are compared in this order.
    """

    value: Any = None
    clauses: Mapping[str, str] = field(default_factory=dict)

    def compare(self, ok: Any, op: str, level: Level) -> None:
        for name, clause in self.clauses.items():
            if isinstance(ok, dict) and name in ok and not _equal(ok[name], self.value[name]):
                raise ClauseViolation(f"{name} of {op}", format_value(self.value[name]), format_value(ok[name]), clause)
        if not _equal(ok, self.value):
            raise ClauseViolation(op, format_value(self.value), format_value(ok), self.clause)

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.value}


def _equal(got: Any, want: Any) -> bool:
    if isinstance(want, dict):  # statistics that an implementation leaves out are not offered, which is not wrong
        return isinstance(got, dict) and all(_equal(got[name], want[name]) for name in want if name in got)
    if isinstance(want, float) and isinstance(got, float):
        return got == want or abs(got - want) <= 2.0**-22 * abs(want)
    return bool(got == want)


@dataclass(frozen=True)
class AnyOf(Expectation):
    """A value that the implementation chooses, such as a new id.

    accepts: whether a value is permitted. range_text: which values are permitted, in words. details: returns the rest of these
    words, if they are slow to compute. value_clause: the clause that a value which is not permitted breaks, if it is not
    `clause`. length: the length of a list, and the clause that a wrong length breaks.
    """

    range_text: str = ""
    details: Callable[[], str] = lambda: ""
    accepts: Callable[[Any], bool] = lambda ok: True
    value_clause: str = ""
    length: tuple[int, str] | None = None

    def compare(self, ok: Any, op: str, level: Level) -> None:
        if self.length and len(ok) != self.length[0]:
            raise ClauseViolation(op, f"a list of {self.length[0]}", f"a list of {len(ok)}: {format_value(ok)}", self.length[1])
        if not self.accepts(ok):
            raise ClauseViolation(op, self.range_text + self.details(), format_value(ok), self.value_clause or self.clause)

    def to_json(self) -> dict[str, Any]:
        return {"chosen": self.range_text + self.details()}


@dataclass(frozen=True)
class NewResult(AnyOf):
    """A new object. model: returns its model; called after the reply."""

    model: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class ExpectedArrays(Expectation):
    """One or more arrays. They must be equal to the bit at level exact, and within the slack at level tolerant.

    names: the names of the arrays in messages. parts: their values and slack. always_slack: whether the slack applies at level
    exact too (attention). weight_slack: returns the additional slack of weights that are rounded to a dtype. undetermined: a
    bool array, true where any value is permitted. clause_at: returns the clause for the first difference. used_slices: the part
    of each array that is compared. shape: the shape of the whole array, if only a part is compared; None stands for any length.
    explain: returns a note about a wrong array, or "". codes_of: a 16-bit format; integer arrays with its codes are accepted too,
    because a library may lack the dtype. bits: whether NaNs must be equal to the bit too.
    """

    names: tuple[str, ...] = ("",)
    parts: tuple[ExpectedReads, ...] = ()
    always_slack: bool = False
    weight_slack: Callable[[str], NDArray] | None = None
    undetermined: NDArray | None = None
    clause_at: ClauseAt | None = None
    explain: Callable[[NDArray], str] = lambda got: ""
    used_slices: tuple[slice, ...] = ()
    shape: tuple[int | None, ...] | None = None
    codes_of: str = ""
    bits: bool = False

    def compare(self, ok: Any, op: str, level: Level) -> None:
        for name, got, want in zip(self.names, ok if isinstance(ok, tuple) else (ok,), self.parts, strict=True):
            what = f"{name} of {op}" if name else op
            array = np.asarray(got)
            if array.dtype == np.float64:
                raise ClauseViolation(what, "float32 or a narrower float", "float64", self.clause)
            shape = self.shape or want.values.shape
            if array.ndim != len(shape) or any(want not in (None, got) for got, want in zip(array.shape, shape, strict=True)):
                raise ClauseViolation(what, f"shape {list(shape)}", f"shape {list(array.shape)}", self.clause)
            self._compare(array[self.used_slices], want, what, level)

    def _compare(self, got: NDArray, want: ExpectedReads, what: str, level: Level) -> None:
        if got.dtype.kind in "iu" and self.codes_of in CODED_DTYPES:
            got = decoded(self.codes_of)[got.astype(np.int64)]
        if want.values.dtype.kind == "f" and got.dtype.kind != "f":
            raise ClauseViolation(what, "float32 or a narrower float", str(got.dtype), self.clause)
        if same_bits(got, want.values):
            return
        differs = difference_mask(got, want, exact=level == "exact" and not self.always_slack, bits=self.bits)
        if self.undetermined is not None:
            differs = differs & ~self.undetermined
        if not differs.any():
            return
        first = tuple(int(i) for i in np.argwhere(differs)[0])
        clause = self.clause_at(first, got) if self.clause_at else self.clause
        note = self.explain(got)
        if want.values.size <= 8:
            raise ClauseViolation(what, format_value(want.values), format_value(got) + note, clause)
        at = f"{what}[{', '.join(map(str, first))}] ({int(differs.sum())} of {differs.size} differ)"
        violation = ClauseViolation(at, format_value(want.values[first]), format_value(got[first]) + note, clause)
        violation.row = got[first[:-1]]
        raise violation

    def to_json(self) -> dict[str, Any]:
        ok: Any = [part.values for part in self.parts] if len(self.parts) > 1 else self.parts[0].values
        said: dict[str, Any] = {"ok": ok}
        if self.always_slack or any(part.slack.any() for part in self.parts):  # "within" even if 0: it makes -0 and 0 equal
            within: Any = [_up(part.slack) for part in self.parts] if len(self.parts) > 1 else _up(self.parts[0].slack)
            said["within" if self.always_slack else "tolerant"] = within
        if self.undetermined is not None:
            said["unsure"] = self.undetermined
        if self.used_slices:
            said["used"] = [axis.stop for axis in self.used_slices] + [None] * (self.parts[0].values.ndim - len(self.used_slices))
        if self.codes_of in CODED_DTYPES:
            said["codes"] = self.codes_of
        return said | ({"bits": True} if self.bits else {})


@dataclass(frozen=True)
class LeadingRows(ExpectedArrays):
    """Three arrays of which only the first ones are compared, because the zero of a symmetric format has no meaning."""

    def compare(self, ok: Any, op: str, level: Any) -> None:
        super().compare(ok[: len(self.parts)], op, level)

    def to_json(self) -> dict[str, Any]:
        said = super().to_json()
        if len(self.parts) == 1:
            said["ok"] = [said["ok"], None, None]
        elif len(self.parts) == 2:
            said = {name: [*parts, None] for name, parts in said.items()}
        return said


def _up(slack: NDArray) -> NDArray:
    """Round up to float32, because the last bits of a float64 differ between machines."""
    with np.errstate(over="ignore"):
        narrow: NDArray = slack.astype(np.float32)
    return np.where(narrow < slack, np.nextafter(narrow, np.float32(np.inf)), narrow)


def difference_mask(got: NDArray, want: ExpectedReads, exact: bool, bits: bool = False) -> NDArray:
    """Where an array is wrong (bool): the bits differ, and, unless `exact`, the difference exceeds the slack.

    All NaNs are equal, unless `bits`.
    """
    values = want.values
    if values.dtype.kind == "f":
        values, got = values.astype(np.float32), got.astype(np.float32)
        different: NDArray = values.view(np.uint32) != got.view(np.uint32)
        if not bits:
            different &= ~(np.isnan(values) & np.isnan(got))
    else:
        values, got = values.astype(np.int64), got.astype(np.int64)
        different = values != got
    if exact or not different.any():
        return different
    with np.errstate(invalid="ignore"):
        outside: NDArray = different & ~(np.abs(got.astype(np.float64) - values) <= want.slack)
    return outside


def exact_reads(values: NDArray) -> ExpectedReads:
    """Values with a slack of 0."""
    return ExpectedReads(values, np.zeros(values.shape))


Errors = list[tuple[str, str]]  # kinds of errors that are correct for a call, each with its clause


def expect_error(wrong: Errors, refused: Callable[[], None]) -> ExpectedError:
    """The expected error of an invalid call. If the call is invalid in several ways, each of the errors is correct (LAW-11)."""
    return ExpectedError(wrong[0][1], kinds=tuple(dict.fromkeys(kind for kind, _ in wrong)), on_error=refused)


ArrayAndShape = tuple[Any, Sequence[int | None]]  # an array, and the shape it must have; None is an axis of any length


def array_errors(*given: ArrayAndShape) -> Errors:
    """The errors for arrays with wrong shapes or dtypes. All axes of any length must have the same length in all arrays."""
    wrong: Errors = []
    lengths: set[int] = set()
    for array, shape in given:
        array = np.asarray(array)
        axes = list(zip(array.shape, shape, strict=False))
        lengths |= {axis for axis, want in axes if want is None}
        if array.ndim != len(shape) or any(want is not None and axis != want for axis, want in axes) or len(lengths) > 1:
            wrong.append(("ShapeMismatch", "LAW-10"))
        wrong += dtype_errors(array)
    return wrong


def dtype_errors(array: Any) -> Errors:
    """The error for an array that is not float32 or a narrower float."""
    dtype = np.asarray(array).dtype
    good = (dtype.kind == "f" or dtype.name == "bfloat16") and dtype != np.float64
    return [] if good else [("DtypeMismatch", "FMT-LEVEL-04")]


def count_tokens(*given: ArrayAndShape) -> int:
    """The largest number of tokens (the axis of any length) in the arrays. Arrays with a wrong number of axes do not count."""
    counted = [np.shape(array)[list(shape).index(None)] for array, shape in given if np.ndim(array) == len(shape)]
    return max(counted, default=0)


def finite_errors(*arrays: Any) -> Errors:
    """The error NonFinite, if an array is not finite: an invalid call may raise it instead (LAW-14)."""
    return [] if all_finite(*map(np.asarray, arrays)) else [("NonFinite", "LAW-14")]


def range_errors(value: Any, stop: int | None, kind: str, clause: str = "LAW-11") -> Errors:
    """The error of this kind, unless `value` is an integer in [0, stop) (None: without an upper limit)."""
    good = is_integer(value) and value >= 0 and (stop is None or value < stop)
    return [] if good else [(kind, clause)]


def id_errors(id: Any, known: Container[int], kind: str = "SequenceNotFound", clause: str = "LAW-11") -> Errors:
    """The error of this kind, unless `id` is a known id."""
    return [] if is_integer(id) and id in known else [(kind, clause)]


def is_integer(value: Any) -> bool:
    """Whether `value` is an integer: True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def to_float32(array: Any) -> NDArray:
    """A copy as float32. (The caller of an operation may overwrite its argument later.)"""
    return np.asarray(array).astype(np.float32)


def all_finite(*arrays: NDArray) -> bool:
    """Whether all numbers are finite."""
    return all(bool(np.isfinite(array.astype(np.float32, copy=False)).all()) for array in arrays)
