"""Everything that can go wrong, as one small tree of exceptions.

Each message says what was expected and what came. The class names are the error kinds by which the judge recognises an
error, in this language or another, so they are part of the specification (LAW-10, LAW-11, LAW-12).
"""

import operator
from collections.abc import Sequence
from numbers import Integral


class KVRefError(Exception):
    """The root of the tree: catch this to catch everything kvref raises on purpose."""


class ConfigError(KVRefError):
    """A cache, a pool or a format cannot be built as asked."""


class ShapeMismatch(KVRefError):
    """An array has another shape than the operation needs."""

    @classmethod
    def check(cls, name: str, actual: Sequence[int | None], expected: Sequence[int | str]) -> None:
        """Raise unless `actual` matches `expected`, in which a string names an axis of any length."""
        if len(actual) == len(expected):
            for got, want in zip(actual, expected, strict=True):
                if want != got and not isinstance(want, str):
                    break
            else:
                return
        wanted = ", ".join(str(axis) for axis in expected)
        raise cls(f"{name}: expected shape [{wanted}], got {list(actual)}")


class DtypeMismatch(KVRefError):
    """An array has a dtype the operation does not take: float64, for example, would be rounded twice."""


class NonFinite(KVRefError):
    """A NaN or an infinity, or a value too large, where the format could not give it back."""


class CapacityExceeded(KVRefError):
    """More tokens, or values, than there is room for."""


class OutOfBlocks(KVRefError):
    """The pool has fewer free blocks than the request needs."""


class BlockNotAllocated(KVRefError):
    """A block that nobody holds: freed twice, never allocated, or not a block of this pool."""


class SequenceNotFound(KVRefError):
    """A sequence that was never created, or has been dropped."""


class PositionOutOfRange(KVRefError):
    """A token position that was never written, was evicted, or would leave a hole."""


class LayerOutOfRange(KVRefError):
    """A layer the cache does not have."""


class HeadOutOfRange(KVRefError):
    """A key-value head the cache does not have."""


class RankOutOfRange(KVRefError):
    """A rank that the cache does not have."""


class RankLost(KVRefError):
    """A rank that the call needs is gone, with what it held."""


class RowOutOfRange(KVRefError):
    """A row that the batch does not have."""


class TokenOutOfRange(KVRefError):
    """A token that the vocabulary does not have."""


class TokenMismatch(KVRefError):
    """Tokens that are not those a sequence was said to hold before."""


class NotTruncatable(KVRefError):
    """What a shorter sequence would hold is gone: evicted, or stored in another way since."""


class InUse(KVRefError):
    """Sequences live that would lose what they hold."""


class SlotOutOfRange(KVRefError):
    """A slot past the end of the store."""


class KeyNotFound(KVRefError):
    """A key whose block a host store does not hold in the state that the call needs: stored, being stored, or being loaded."""


class BufferTooLarge(KVRefError):
    """A buffer larger than the largest size class."""


class BufferReleased(KVRefError):
    """A buffer used after it was given back."""


class FileDamaged(KVRefError):
    """What is to be loaded is no whole file of a cache: bytes were changed or are missing, or it is something else."""


class BackendNotFound(KVRefError):
    """No backend of that name is installed, or its library is missing."""


LARGEST = 2**63 - 1  # what an index is, here and in every array library


def integer(value: object) -> int | None:
    """`value` as Python's own integer, or None for what is no integer. True and False are none.

    NumPy's are integers too, and wrap around as Python's do not: none may stay in a cache, or go into a sum (LAW-20).
    """
    if type(value) is int:
        return value
    return operator.index(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def whole(name: str, value: int, minimum: int = 1, maximum: int = LARGEST) -> int:
    """`value` as Python's integer. Raises ConfigError unless it is one in [minimum, maximum] (LAW-12)."""
    number = integer(value)
    if number is None or number < minimum:
        raise ConfigError(f"{name}: expected an integer of at least {minimum}, got {value!r}")
    if number > maximum:
        raise ConfigError(f"{name}: expected at most {maximum}, got {value!r}")
    return number


def whole_fields(config: object, *names: str, minimum: int = 1) -> None:
    """`whole` of fields of a frozen dataclass, which keeps what it gives. For __post_init__."""
    for name in names:
        object.__setattr__(config, name, whole(name, getattr(config, name), minimum))


def in_range(value: int, stop: int | None, error: type[KVRefError], what: str) -> int:
    """`value` as Python's integer. Raises `error` unless it is in [0, stop): a negative index counts from nowhere (LAW-11)."""
    number = integer(value)
    if number is None or number < 0 or (stop is not None and number >= stop):
        if stop == 0 and number is not None and number >= 0:
            raise error(f"{what}: {value!r} is out of range (there are none)")
        wanted = "an integer of at least 0" if stop is None else f"an integer in [0, {stop})"
        raise error(f"{what}: expected {wanted}, got {value!r}")
    return number
