"""What a check says when it looks at a result: each of these raises Broken with what was expected and what came.

What was got is `Any` throughout: it came from an implementation, and may be anything.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from kvref_conformance.arrays import NDArray
from kvref_conformance.conversation.derived import refused_whole
from kvref_conformance.conversation.exchange import error_of, kinds_of, show
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.oracle.formats import ROTATED
from kvref_conformance.oracle.rotated import block_of
from kvref_conformance.oracle.rows import Reads
from kvref_conformance.outcome import Broken, NotOffered


def equal(got: Any, want: Any, what: str) -> None:
    """Plain values: numbers, strings, lists of integers."""
    got = got.item() if isinstance(got, np.ndarray) and got.ndim == 0 else got
    if got != want:
        raise Broken(what, show(want), show(got))


def true(condition: Any, what: str, expected: str, got: Any) -> None:
    if not condition:
        raise Broken(what, expected, show(got))


def shaped(got: Any, shape: tuple[int, ...], what: str) -> NDArray:
    array = np.asarray(got)
    if isinstance(got, np.ndarray) and got.dtype == np.float64:  # comparing it as float32 would do the rounding for it
        raise Broken(what, "float32 or a narrower float", "float64")
    if array.shape != tuple(shape):
        raise Broken(what, f"shape {list(shape)}", f"shape {list(array.shape)}")
    return array


def same(got: Any, want: NDArray | np.generic, what: str) -> None:
    """The same shape and the same bits; a NaN stands for any NaN, and -0 is not 0."""
    want = np.asarray(want)
    got = shaped(got, want.shape, what)
    if want.dtype.kind == "f":
        if got.dtype.kind != "f":
            raise Broken(what, "float32 or a narrower float", str(got.dtype))
        want, got = want.astype(np.float32), got.astype(np.float32)
        differs = (got.view(np.uint32) != want.view(np.uint32)) & ~(np.isnan(got) & np.isnan(want))
    else:
        differs = got != want
    _raise_at(differs, got, want, what, "")


def within(got: Any, want: ArrayLike, bound: ArrayLike, what: str) -> None:
    """No further from `want` than `bound`, both float64."""
    want = np.asarray(want, dtype=np.float64)
    got = shaped(got, want.shape, what)
    bound = np.broadcast_to(np.asarray(bound, dtype=np.float64), want.shape)
    differs = ~(np.abs(got.astype(np.float64) - want) <= bound)
    _raise_at(differs, got, want, what, " within {}", bound)


def pair(got: Any, want: tuple[NDArray, NDArray], what: str) -> None:
    """Keys and values, each the same to the bit."""
    same(got[0], want[0], f"keys of {what}")
    same(got[1], want[1], f"values of {what}")


def reads(subject: Subject, got: Any, want: tuple[Reads, Reads], what: str, format: str = "") -> None:
    """Keys and values as the oracle says they read; of a rotated format whole blocks, too."""
    for name, part, wanted in zip(("keys", "values"), got, want, strict=True):
        read(subject, part, wanted, f"{name} of {what}", format)


def read(subject: Subject, got: Any, want: Reads, what: str, format: str = "") -> None:
    """The same to the bit as the oracle says, or within the slack of level tolerant."""
    if subject.level == "exact":
        same(got, want.values, what)
    else:
        within(got, want.values, want.slack, what)
        if format in ROTATED and want.values.size:
            within_lengths(got, want.values, want.slack, what)


def within_lengths(got: Any, want: NDArray, bound: NDArray, what: str) -> None:
    """Of each rotated block what it is off is no longer, as l2 norm, than the bound that all its values have (FMT-ROT-05)."""
    block = block_of(want.shape[-1])
    length = np.linalg.norm((np.asarray(got).astype(np.float64) - want).reshape(-1, block), axis=1)
    most = np.asarray(bound, np.float64).reshape(-1, block).max(axis=1)
    _raise_at(~(length <= most), length, np.zeros(length.shape), f"how long blocks are off of {what}", " within {}", most)


@contextmanager
def may_raise(kind: str) -> Iterator[None]:
    """The block raises an error of this kind, or none."""
    try:
        yield
    except (NotOffered, Broken):
        raise
    except Exception as error:
        refused_whole(error)
        if kind not in kinds_of(error):
            raise Broken("", f"{kind} or no error", f"{type(error).__name__}: {error_of(error).message}") from error


@contextmanager
def raises(*kinds: str) -> Iterator[None]:
    """The block raises an error of one of these kinds (class names, as in kvref.errors)."""
    wanted = "an error" if kinds == ("Exception",) else " or ".join(kinds)
    try:
        yield
    except (NotOffered, Broken):
        raise
    except Exception as error:
        refused_whole(error)
        if not set(kinds) & set(kinds_of(error)):
            raise Broken("", f"{wanted} to be raised", f"{type(error).__name__}: {error_of(error).message}") from error
    else:
        raise Broken("", f"{wanted} to be raised", "no error")


def _raise_at(differs: NDArray, got: NDArray, want: NDArray, what: str, suffix: str, *details: NDArray) -> None:
    if not differs.any():
        return
    if want.size <= 8:
        raise Broken(what, show(want) + suffix.format(*map(show, details)), show(got))
    index = tuple(int(i) for i in np.argwhere(differs)[0])
    at = f"{what}[{', '.join(map(str, index))}] ({int(differs.sum())} of {differs.size} differ)"
    one = [repr(float(each[index])) for each in details]
    raise Broken(at, repr(want[index].item()) + suffix.format(*one), repr(got[index].item()))
