"""The exceptions of kvref: one class per kind of error, all derived from KVRefError.

The class names are the error kinds of the specification (LAW-10, LAW-11, LAW-12): the judge compares errors by class name, also
for implementations in other languages. An operation that raises one of them changes nothing (LAW-01).

Messages about arguments have the form "expected ..., got ...". Messages about state describe the state: "out of blocks: 7
needed, 6 free".
"""

import operator
from collections.abc import Sequence
from numbers import Integral


class KVRefError(Exception):
    """Base class of all errors that kvref raises deliberately. Catch it to catch all of them."""


class ConfigError(KVRefError):
    """Invalid configuration: a size, a format or a combination of them that a cache, pool or format does not support (LAW-12)."""


class ShapeMismatch(KVRefError):
    """An array does not have the shape that the operation requires (LAW-10). The message contains both shapes."""

    @classmethod
    def check(cls, name: str, actual: Sequence[int | None], expected: Sequence[int | str]) -> None:
        """Raise ShapeMismatch unless the shape `actual` matches `expected`.

        In `expected` an integer is a required length, and a string names an axis of any length. name: the argument's name, for
        the message.
        """
        if len(actual) == len(expected):
            for got, want in zip(actual, expected, strict=True):
                if want != got and not isinstance(want, str):
                    break
            else:
                return
        wanted = ", ".join(str(axis) for axis in expected)
        raise cls(f"{name}: expected shape [{wanted}], got {list(actual)}")


class DtypeMismatch(KVRefError):
    """An array has a dtype that the operation does not accept.

    Caches accept float32, float16 and bfloat16 (FMT-LEVEL-04). They reject float64, because it would be rounded twice: to
    float32, and then to the format of the cache.
    """


class NonFinite(KVRefError):
    """An input has a NaN, an infinity or a magnitude that the format cannot store as a finite number (LAW-14, FMT-LEVEL-05)."""


class CapacityExceeded(KVRefError):
    """A cache or a buffer has no room for the tokens or values of the call."""


class OutOfBlocks(KVRefError):
    """The call needs more blocks than are free. A scheduler can evict or preempt a sequence and repeat the call."""


class BlockNotAllocated(KVRefError):
    """A block that is not allocated: already freed, never allocated, or not a block of this pool (BLOCK-05)."""


class SequenceNotFound(KVRefError):
    """An unknown sequence or session: never created, or already dropped (PAGED-08)."""


class PositionOutOfRange(KVRefError):
    """A token position, length or count is out of range.

    For example a position that was never written, a position whose token was evicted or released, a write that would leave a gap
    (PAGED-10), or a negative count.
    """


class LayerOutOfRange(KVRefError):
    """A layer that the cache does not have."""


class HeadOutOfRange(KVRefError):
    """A kv head that the cache does not have."""


class RankOutOfRange(KVRefError):
    """A rank that the cache does not have."""


class RankLost(KVRefError):
    """A rank that the call needs is lost, with the tokens it had (SHARD-04)."""


class TransferNotFound(KVRefError):
    """A transfer that is not in the state that the call needs: open, or aborted and not yet fenced (TRANSFER-06)."""


class TransferIncomplete(KVRefError):
    """A transfer cannot be committed, because some of its rows have not arrived (TRANSFER-04)."""


class AlreadyArrived(KVRefError):
    """A part of a transfer contains rows that have arrived before (TRANSFER-03)."""


class ExportNotFound(KVRefError):
    """An unknown export: never created, or already released (TRANSFER-10)."""


class SourceNotWritten(KVRefError):
    """A source of cross-attention is read before it was written (CROSS-02)."""


class SourceAlreadyWritten(KVRefError):
    """A source of cross-attention is written a second time (CROSS-03)."""


class RowOutOfRange(KVRefError):
    """A row that the batch does not have (EDIT-09)."""


class TokenOutOfRange(KVRefError):
    """A token that is not an integer in the permitted range: in `[0, 2^63)`, or in the vocabulary of an engine."""


class TokenMismatch(KVRefError):
    """A token differs from the token that was committed at the same position (PREFIX-02)."""


class NotTruncatable(KVRefError):
    """A sequence cannot be truncated to this length: tokens it would need were evicted or quantized meanwhile (EDIT-06)."""


class InUse(KVRefError):
    """The operation is impossible while sequences are live, which would lose their tokens (PREFIX-11)."""


class SlotOutOfRange(KVRefError):
    """A slot, block or place that the store does not have (KERN-03, MOVE-12)."""


class KeyNotFound(KVRefError):
    """A key that a host store does not have in the state that the call needs: stored, being stored, or being loaded."""


class BufferTooLarge(KVRefError):
    """A buffer was requested that is larger than the largest size class (BUF-01)."""


class BufferReleased(KVRefError):
    """A buffer was used after its release (BUF-09)."""


class FileDamaged(KVRefError):
    """The data to load is not a complete, unchanged file of a cache (MOVE-03)."""


class BackendNotFound(KVRefError):
    """No backend of that name is installed, or its library is missing."""


LARGEST = 2**63 - 1  # the largest int64, the index type of array libraries


def integer(value: object) -> int | None:
    """Return `value` as a Python int, or None if it is not an integer. Booleans are not integers.

    NumPy's integers are converted, because they wrap around on overflow: a cache must not store them or calculate with them
    (LAW-20).
    """
    if type(value) is int:
        return value
    return operator.index(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def whole(name: str, value: int, minimum: int = 1, maximum: int = LARGEST) -> int:
    """Return `value` as a Python int. Raises ConfigError unless it is an integer and minimum <= value <= maximum (LAW-12)."""
    number = integer(value)
    if number is None or number < minimum:
        raise ConfigError(f"{name}: expected an integer of at least {minimum}, got {value!r}")
    if number > maximum:
        raise ConfigError(f"{name}: expected at most {maximum}, got {value!r}")
    return number


def whole_fields(config: object, *names: str, minimum: int = 1) -> None:
    """Replace fields of a frozen dataclass by Python ints. For `__post_init__`.

    Raises ConfigError unless each field is an integer of at least `minimum`.
    """
    for name in names:
        object.__setattr__(config, name, whole(name, getattr(config, name), minimum))


def in_range(value: int, stop: int | None, error: type[KVRefError], what: str) -> int:
    """Return `value` as a Python int. Raises `error` unless it is an integer in `[0, stop)`; stop None: any from 0 on (LAW-11).

    A negative value is out of range: it does not count from the end. what: the name of the argument, for the message.
    """
    number = integer(value)
    if number is None or number < 0 or (stop is not None and number >= stop):
        if stop == 0:
            raise error(f"{what}: {value!r} is out of range (the range is empty)")
        wanted = "an integer of at least 0" if stop is None else f"an integer in [0, {stop})"
        raise error(f"{what}: expected {wanted}, got {value!r}")
    return number
