"""Small objects to check: one configuration a family, and rows to put in.

Sizes are small, odd and all different, so that an axis taken for another shows.
"""

from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import raises
from kvref_conformance.conversation.exchange import error_of
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families import all_families
from kvref_conformance.oracle.elements import round_to
from kvref_conformance.oracle.formats import DRIFTING, GROUPS, KINDS, PLAIN, SCALED, either, has
from kvref_conformance.oracle.witness import MADE
from kvref_conformance.outcome import Broken, NotOffered

FEW = 6  # of the formats of FMT-GROUP


def new(subject: Subject, family: str, **changes: Any) -> Handle:
    """A small object of the family. Raises NotOffered, also for a format it does not have."""
    subject.factory(family)  # a family that is missing is said before a format that is
    return made(subject, family, **fitted(subject, family, **changes))


def fitted(subject: Subject, family: str, **changes: Any) -> dict[str, Any]:
    """The family's small sizes with some changed, each as near as its limits allow. Raises NotOffered."""
    record = all_families()[family]
    config = record.small | changes
    config |= subject.limits.sizes(record, config)
    for name, among in record.formats.items():
        if record.small[name] in PLAIN:  # then a check that names none compares with what it handed in
            among = [each for each in among if each not in SCALED]
        wanted = (changes[name],) if name in changes else dict.fromkeys((record.small[name], *among))
        taken = formats_of(subject, name, *wanted)
        config[name] = next((each for each in taken if record.together(config | {name: each})), taken[0])
    if not record.together(config):
        raise NotOffered(f"{family} of sizes that its limits allow and that fit together")
    return config


def made(subject: Subject, family: str, **config: Any) -> Handle:
    """An object of sizes that its limits allow. Raises NotOffered, and Broken where it is refused."""
    try:
        return subject.new(family, **config)
    except (Broken, NotOffered):
        raise
    except Exception as error:
        said = error_of(error)
        got = f"{said.kind}: {said.message}"
        raise Broken(f"{family}.new", MADE, got, "LAW-12", said.where) from error


def at_least(cache: Handle, **sizes: int) -> None:
    """Raises NotOffered where its limits left a cache less than a check needs."""
    for name, size in sizes.items():
        if cache.config[name] < size:
            raise NotOffered(f"{name} {size}, where its limits leave {cache.config[name]}")


def takes(subject: Subject, name: str, value: Any) -> bool:
    """Whether a size or format of the check's family may be this: offered, and within its limits."""
    if not isinstance(value, str):
        return subject.limits.of(subject.family, name).allows(value)
    return subject.limits.takes(subject.family, name, value)


def formats_of(subject: Subject, name: str, *wanted: str) -> list[str]:
    """Those of some formats that a size of the check's family may have. Raises NotOffered where there is none."""
    limit, had = subject.limits.of(subject.family, name), [each for each in wanted if has(subject.implementation.formats, each)]
    if had and not any(limit.allows(each) for each in had):
        raise NotOffered(f"{either(wanted).replace('format', name, 1)}, where its limits say {limit}")
    if found := [each for each in wanted if takes(subject, name, each)]:
        return found
    raise NotOffered(either(wanted))


def few(subject: Subject, formats: list[str]) -> list[str]:
    """Formats without most of those of FMT-GROUP, which differ in one thing only: other ones for each check."""
    many = [name for name in formats if name in GROUPS]
    kept = set(subject.rng.choice(many, FEW, replace=False).tolist()) if len(many) > FEW else set(many)
    return [name for name in formats if name not in many or name in kept]


def one_of_each_kind(subject: Subject, name: str) -> list[str]:
    """Formats with a scale that a size of the check's family may have, one of each of KINDS: other ones for each check.

    And the one, where it is had, that shows whether a token is quantized twice.
    """
    among = all_families()[subject.family].formats[name]
    had = formats_of(subject, name, *(each for each in SCALED if each in among))
    kinds = [[each for each in kind if each in had] for kind in (*KINDS, (DRIFTING,))]
    return [str(subject.rng.choice(kind)) for kind in kinds if kind]


def tokens(subject: Subject, count: int, heads: int | None = None, dim: int | None = None) -> NDArray:
    """float32 [count, heads, dim]: normal rows, each of a magnitude of its own, in numbers that its dtype holds."""
    heads, dim = subject.heads if heads is None else heads, subject.dim if dim is None else dim
    magnitude = 2.0 ** subject.rng.integers(-4, 5, size=(count, heads, 1))
    return held(subject, subject.rng.normal(size=(count, heads, dim)) * magnitude)


def held(subject: Subject, numbers: NDArray) -> NDArray:
    """float32, in numbers that the dtype of what is handed in holds."""
    return round_to(numbers.astype(np.float32), subject.dtype)


def pair_of_tokens(subject: Subject, count: int, heads: int | None = None, dim: int | None = None) -> tuple[NDArray, NDArray]:
    return tokens(subject, count, heads, dim), tokens(subject, count, heads, dim)


def other(size: int) -> int:
    """A size that is not this one: the one before, for a missing row may be broadcast; of 1, the one after."""
    return size - 1 or size + 1


def blocks_of(cache: Handle, sequence: int, layer: int) -> list[int]:
    """A block table as plain numbers: an implementation may give an array, ready for a kernel."""
    return [int(block) for block in cache.block_table(sequence, layer)]


def batch_major(rows: NDArray) -> NDArray:
    """[n, heads, dim] -> [1, heads, n, dim], as the contiguous cache takes it."""
    return np.ascontiguousarray(rows.transpose(1, 0, 2)[None])


def refused(subject: Subject, family: str, **change: Any) -> None:
    """A configuration that makes no sense is a ConfigError."""
    with raises("ConfigError"):
        subject.new(family, **fitted(subject, family) | change)
