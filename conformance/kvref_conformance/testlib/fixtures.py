"""Small objects for checks, and tokens to append to them.

Each family has one configuration of small sizes. They are odd and all different, so that swapped axes are detected.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvref_conformance.calls.messages import to_call_error
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.recorder import OwnArray
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.families import all_families
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.limits import describe_refusal
from kvref_conformance.oracle.formats import (
    DRIFTING_FORMAT,
    FORMAT_KINDS,
    GROUP_FORMATS,
    PLAIN_FORMATS,
    SCALED_FORMATS,
    describe_formats,
    includes_format,
)
from kvref_conformance.oracle.formats.small_floats import round_to
from kvref_conformance.oracle.model_runner import EXPECTED_OBJECT
from kvref_conformance.testlib.assertions import raises

# NaNs with the lowest or the highest bits of the mantissa. A cast can round some of them to infinity or to 0.
NANS = np.array(
    [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0xFF800001, 0x7FFFFFFF, 0x7F808000, 0x7F80FFFF, 0x7FFF8000], np.uint32
).view(np.float32)
SAMPLE_SIZE = 6  # the number of FMT-GROUP formats that a check samples


def new_object(subject: Subject, family: str, **changes: Any) -> ObjectProxy:
    """Create a small object of the family. Raises NotOffered if the family or a format is missing."""
    subject.factory(family)  # so that a missing family is reported before a missing format
    return construct(subject, family, **clamp_to_limits(subject, family, **changes))


def clamp_to_limits(subject: Subject, family: str, **changes: Any) -> dict[str, Any]:
    """The family's small sizes with some changes, each replaced by the nearest value within the limits. Raises NotOffered."""
    record = all_families()[family]
    config = record.small | changes
    config |= subject.limits.sizes(record, config)
    for name, among in record.formats.items():
        if record.small[name] in PLAIN_FORMATS:  # checks that do not choose a format expect exactly the values that they wrote
            among = [each for each in among if each not in SCALED_FORMATS]
        wanted = (changes[name],) if name in changes else dict.fromkeys((record.small[name], *among))
        taken = supported_formats(subject, name, *wanted)
        config[name] = next((each for each in taken if record.together(config | {name: each})), taken[0])
    if not record.together(config):
        raise NotOffered(f"{family} with consistent sizes within its limits")
    return config


def construct(subject: Subject, family: str, **config: Any) -> ObjectProxy:
    """Create an object with valid sizes. Raises NotOffered; ClauseViolation (LAW-12) if the factory raises."""
    try:
        return subject.new(family, **config)
    except (ClauseViolation, NotOffered):
        raise
    except Exception as error:
        said = to_call_error(error)
        got = describe_refusal(family, said.kind, said.message)
        raise ClauseViolation(f"{family}.new", EXPECTED_OBJECT, got, "LAW-12", said.where) from error


def require_sizes(cache: ObjectProxy, **sizes: int) -> None:
    """Raise NotOffered if the limits reduced a size of the cache below what a check needs."""
    for name, size in sizes.items():
        if cache.config[name] < size:
            raise NotOffered(f"{name} {size}, where its limits leave {cache.config[name]}")


def supports(subject: Subject, name: str, value: Any) -> bool:
    """Whether the implementation supports this value of a size or format of the check's family."""
    if not isinstance(value, str):
        return subject.limits.limit(subject.family, name).allows(value)
    return subject.limits.allows_format(subject.family, name, value)


def supported_formats(subject: Subject, name: str, *wanted: str) -> list[str]:
    """The supported ones among the wanted formats, for a size of the check's family. Raises NotOffered if there are none."""
    limit, had = (
        subject.limits.limit(subject.family, name),
        [each for each in wanted if includes_format(subject.implementation.formats, each)],
    )
    if had and not any(limit.allows(each) for each in had):
        raise NotOffered(f"{describe_formats(wanted).replace('format', name, 1)}, where its limits say {limit}")
    if found := [each for each in wanted if supports(subject, name, each)]:
        return found
    raise NotOffered(describe_formats(wanted))


def sample_formats(subject: Subject, formats: list[str]) -> list[str]:
    """The formats with only a sample of the similar formats of FMT-GROUP. Each check samples different ones."""
    many = [name for name in formats if name in GROUP_FORMATS]
    kept = set(subject.rng.choice(many, SAMPLE_SIZE, replace=False).tolist()) if len(many) > SAMPLE_SIZE else set(many)
    return [name for name in formats if name not in many or name in kept]


def one_format_per_kind(subject: Subject, name: str) -> list[str]:
    """Formats with scales for a size of the check's family: one supported format per kind (FORMAT_KINDS), sampled per check.

    If supported, DRIFTING_FORMAT is added, which shows whether a token is quantized twice.
    """
    among = all_families()[subject.family].formats[name]
    had = supported_formats(subject, name, *(each for each in SCALED_FORMATS if each in among))
    kinds = [[each for each in kind if each in had] for kind in (*FORMAT_KINDS, (DRIFTING_FORMAT,))]
    return [str(subject.rng.choice(kind)) for kind in kinds if kind]


def random_tokens(subject: Subject, count: int, heads: int | None = None, dim: int | None = None) -> NDArray:
    """Random tokens float32 [count, heads, dim]. Each row has its own magnitude. The values are exact in the subject's dtype."""
    heads, dim = subject.heads if heads is None else heads, subject.dim if dim is None else dim
    magnitude = 2.0 ** subject.rng.integers(-4, 5, size=(count, heads, 1))
    return round_to_input_dtype(subject, subject.rng.normal(size=(count, heads, dim)) * magnitude)


def round_to_input_dtype(subject: Subject, numbers: NDArray) -> NDArray:
    """The numbers as float32, rounded to values that are exact in the dtype of the subject's arguments."""
    return round_to(numbers.astype(np.float32), subject.dtype)


def random_pair(subject: Subject, count: int, heads: int | None = None, dim: int | None = None) -> tuple[NDArray, NDArray]:
    """Random keys and values [count, heads, dim] of tokens that all differ. Of 4 or more tokens, two have equal keys, and two
    have equal values: a cache must not recognize a token by one of them.
    """
    keys, values = random_tokens(subject, count, heads, dim), random_tokens(subject, count, heads, dim)
    if count > 3:
        keys[2], values[-1] = keys[1], values[0]
    return keys, values


def padded_arguments(
    pairs: Sequence[tuple[NDArray, NDArray]], padding: float, more: int = 0, left: bool = False
) -> dict[str, Any]:
    """The keys, values and counts of a call for a batch of rows, which have these keys and values, [n, heads, dim] each.

    padding: the number in the other columns. more: columns that are padding in every row. left: whether padding comes first.
    """
    counts = [len(keys) for keys, _ in pairs]
    columns = max(counts) + more
    arrays = []
    for part in (0, 1):
        array = np.full((len(pairs), columns, *pairs[0][part].shape[1:]), padding, np.float32)
        for row, (pair, count) in enumerate(zip(pairs, counts, strict=True)):
            array[row, slice(columns - count, columns) if left else slice(0, count)] = pair[part]
        arrays.append(np.ascontiguousarray(array.swapaxes(1, 2)))
    named: dict[str, Any] = {"counts": counts} if min(counts) < columns else {}
    return {"keys": arrays[0], "values": arrays[1]} | named | ({"left": True} if left and named else {})


def strided_view(subject: Subject, array: NDArray, cast: bool = True) -> OwnArray:
    """A view with the elements of the array, whose last two axes are not contiguous. Raises NotOffered through a pipe.

    cast: whether float32 becomes the dtype of array arguments; not for codes and scales, which keep the dtype they have.
    """
    subject.require_same_process("views of memory")
    apart: Any = (..., *[slice(None, None, 2)] * min(2, array.ndim))
    wide = np.full((*array.shape[:-2], *(2 * size for size in array.shape[-2:])), 77, array.dtype)
    wide[apart] = array
    own = subject.to_own_array(wide).array if cast else subject.implementation.asarray(wide)
    return OwnArray(own[apart])


def different_size(size: int) -> int:
    """A wrong size: one less, because a row too few might be broadcast silently; for 1, one more."""
    return size - 1 or size + 1


def block_table_of(cache: ObjectProxy, sequence: int, layer: int) -> list[int]:
    """A block table as Python integers. An implementation may return an array."""
    return [int(block) for block in cache.block_table(sequence, layer)]


def to_batch_major(rows: NDArray) -> NDArray:
    """Transpose tokens [n, heads, dim] to [1, heads, n, dim], the layout of the contiguous cache."""
    return np.ascontiguousarray(rows.transpose(1, 0, 2)[None])


def assert_config_error(subject: Subject, family: str, **change: Any) -> None:
    """Raise ClauseViolation unless a factory raises ConfigError for the small sizes with this change."""
    with raises("ConfigError"):
        subject.new(family, **clamp_to_limits(subject, family) | change)
