"""What an implementation takes: the sizes, formats and arguments that it is made for.

    limits = {
        "head_dim": [64, 128],                  # one of these
        "block_size": 16,                       # this one alone
        "num_layers": {"least": 1, "most": 1},  # from least to most; "multiple_of" may stand beside them, or alone
        "dtype": ["float16"],                   # of the cache, and of every array that is handed in
        "paged": {"num_kv_heads": {"multiple_of": 2}},  # of one family, before what stands outside
    }

Checks ask for the sizes they like and get the nearest allowed ones. What a clause needs and cannot have is *not offered*, with
that reason. Within its limits an implementation has to refuse nothing (LAW-12).
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import product
from math import gcd
from numbers import Integral
from typing import Any

from kvref_conformance.families import Family, all_families
from kvref_conformance.oracle.formats import PLAIN, has

# Limits that are no size of a family, with what each limits (as kvref/spec/protocol.md lists them).
ARGUMENTS = {
    "tokens": "number of tokens per call of `append` or `write`; allows 1",
    "sequences": "number of live sequences; allows 1",
    "group_size": "number of query heads per kv head",
    "width": "numbers per row",
    "nope_dim": "for latents: numbers of a head's key that are not rotated",
    "value_dim": "for latents: numbers of a head's value",
    "negative_integers": "`false` if arguments have an unsigned type",
    "one_block_table": "`true` if all layers share one block table",
    "other_eviction_order": "`true` if blocks are evicted in another order than PREFIX-08 defines",
    "tables_alone": "`true` if the cache has block tables but stores no tokens",
}
SWITCHES = {
    "negative_integers": True,
    "one_block_table": False,
    "other_eviction_order": False,
    "tables_alone": False,
}  # and what they are unless it is said
RANGE = ("least", "most", "multiple_of")
WIDEST = 512  # how far is looked for a size that some format goes into
ONE_AT_LEAST = ("tokens", "sequences")  # who cannot take one alone cannot take what is left of a whole in pieces


class LimitsError(Exception):
    """Limits that say nothing, or contradict themselves: says what came and what was expected."""


@dataclass(frozen=True)
class Limit:
    """Of one size. among: the values it may have; empty where it is a range."""

    among: tuple[Any, ...] = ()
    least: int = 0
    most: int | None = None
    multiple_of: int = 1

    def allows(self, value: Any) -> bool:
        if self.among:
            return value in self.among
        if isinstance(value, str):
            return True
        return bool(value >= self.least and (self.most is None or value <= self.most) and value % self.multiple_of == 0)

    @property
    def largest(self) -> int | None:
        """The most that it allows; None where there is no end."""
        return max(self.among) if self.among else self.most

    @property
    def smallest(self) -> int:
        return min(self.among) if self.among else self.least

    def at_most(self, wanted: int) -> int | None:
        """The largest value that it allows from 1 to the one that is wanted; None where there is none."""
        if self.among:
            return max((each for each in self.among if 0 < each <= wanted), default=None)
        found = min(wanted, wanted if self.most is None else self.most) // self.multiple_of * self.multiple_of
        return found if found >= max(self.least, 1) else None

    def nearest(self, wanted: Any) -> Any:
        """The allowed value nearest to the one that is wanted, of a range the next above if there is one. Of words the first."""
        if self.allows(wanted):
            return wanted
        if not self.among:
            step = self.multiple_of
            low, high = -(-max(self.least, 0) // step) * step, None if self.most is None else self.most // step * step
            rounded = max(-(-wanted // step) * step, low)
            return rounded if high is None else min(rounded, high)
        if isinstance(wanted, str) or isinstance(self.among[0], str):
            return self.among[0]
        return min(self.among, key=lambda value: (abs(value - wanted), -value))

    def above(self, wanted: int) -> Any:
        """The least allowed value that is no less than the one that is wanted; the nearest where there is none."""
        return self.nearest(min((each for each in self.among if each >= wanted), default=wanted))

    def __str__(self) -> str:
        if self.among:
            return " or ".join(map(str, self.among))
        parts = [f"at least {self.least}"] if self.least else []
        parts += [f"at most {self.most}"] if self.most is not None else []
        parts += [f"a multiple of {self.multiple_of}"] if self.multiple_of > 1 else []
        return ", ".join(parts) or "any"


ANY = Limit()


@cache
def known() -> frozenset[str]:
    """The names that may be limited: the sizes of any family, and ARGUMENTS."""
    return frozenset(ARGUMENTS).union(*(family.small for family in all_families().values()))


class Limits:
    """The limits of one implementation. Raises LimitsError for what says nothing, or contradicts itself.

    formats: that it has, where that is known: sizes are sought that one of them goes into.
    """

    def __init__(self, declared: Any = None, formats: Collection[str] | None = None) -> None:
        if declared is not None and not isinstance(declared, Mapping):
            raise LimitsError(f"limits: expected names and what each may be, got {declared!r}")
        self.declared: dict[str, Any] = dict(declared or {})
        self.formats = formats
        self._formats: dict[str, tuple[tuple[str, ...], ...]] = {}  # by family, what each format among its sizes may be
        self._of_all: dict[str, Limit] = {}
        self._of_family: dict[str, dict[str, Limit]] = {}
        for name, value in self.declared.items():
            if name in all_families():
                if not isinstance(value, Mapping):
                    raise LimitsError(f"limits: {name}: expected names and what each may be, got {value!r}")
                self._of_family[name] = {each: _limit(f"{name}.{each}", each, of) for each, of in value.items()}
            else:
                self._of_all[name] = _limit(name, name, value)

        self._fit()

    def _fit(self) -> None:
        """Raises LimitsError where a size that holds others is never as large as they are."""
        for family in all_families().values():
            for whole, parts in family.holds.items():
                most, least = self.of(family.name, whole).largest, sum(self.of(family.name, part).smallest for part in parts)
                if most is not None and least > most:
                    raise LimitsError(
                        f"limits: {whole}: at most {most}, and of {family.name} less than {' and '.join(parts)}, at least {least}"
                    )

    def of(self, family: str, name: str) -> Limit:
        """Of one size or argument of a family; one that allows everything where nothing is said."""
        return self._of_family.get(family, {}).get(name) or self._of_all.get(name) or ANY

    def takes(self, family: str, name: str, format: str) -> bool:
        """Whether one of the formats among a family's sizes may be this: offered, and allowed."""
        offered = self.formats is None or has(self.formats, format)
        plain = format not in PLAIN or format in self.dtypes(family)
        return offered and plain and self.of(family, name).allows(format)

    def nearest(self, family: str, name: str, wanted: Any) -> Any:
        """The allowed value nearest to the one that is wanted, and that some format it has goes into, if there is one."""
        record, limit = all_families().get(family), self.of(family, name)
        if record is None or not record.formats or name not in record.small or name in record.formats:
            return limit.nearest(wanted)
        if family not in self._formats:
            of_each = record.formats.items()
            self._formats[family] = tuple(tuple(each for each in of if self.takes(family, size, each)) for size, of in of_each)
        return _fitting(family, name, limit, wanted, self._formats[family])

    def sizes(self, family: Family, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Those of some sizes of a family that are numbers: each as near as is allowed, and large enough for what it holds."""
        sizes = [name for name in wanted if name in family.small and name not in family.formats]
        near = {name: self.nearest(family.name, name, wanted[name]) for name in sizes}
        if "num_blocks" in near and self.switch(family.name, "one_block_table"):  # its own are one for all layers
            layers = near["num_layers"]
            near["num_blocks"] = layers * self.nearest(family.name, "num_blocks", wanted["num_blocks"] // layers)
        for whole, parts in family.holds.items():
            near[whole] = self.of(family.name, whole).above(max(near[whole], sum(near[part] for part in parts)))
        for whole, part in family.multiples.items():
            if {whole, part} <= near.keys():
                near[part] = self.nearest(family.name, part, gcd(near[whole], near[part]))
                near[whole] = self.nearest(family.name, whole, -(-near[whole] // near[part]) * near[part])
        return near

    def beyond(self, family: str, config: Mapping[str, Any]) -> str:
        """What it does not allow of the sizes of an object; nothing where it allows them all."""
        found = list[str]()
        for name in all_families()[family].small:
            shared = name == "num_blocks" and self.switch(family, "one_block_table")  # its own are one for all layers
            own = config[name] // config["num_layers"] if shared else config[name]
            if not self.of(family, name).allows(own):
                found.append(f"{name} {own}, where its limits say {self.of(family, name)}")
        return "; ".join(found)

    def switch(self, family: str, name: str) -> bool:
        """One of SWITCHES."""
        limit = self.of(family, name)
        return bool(limit.among[0]) if limit.among else SWITCHES[name]

    def dtypes(self, family: str) -> tuple[str, ...]:
        """Those that arrays may be handed in as: the first is what they are made as."""
        limit = self.of(family, "dtype")
        return tuple(name for name in PLAIN if name in limit.among) or PLAIN  # a cache of codes alone takes any


@cache
def _fitting(family: str, name: str, limit: Limit, wanted: Any, among: tuple[tuple[str, ...], ...]) -> Any:
    """The allowed value of a size that is nearest; where none of its formats goes into that, the nearest that most go into.

    among: what each format among the family's sizes may be.
    """
    record, found = all_families()[family], limit.nearest(wanted)

    def fits(value: int) -> Iterator[bool]:
        each_way = (dict(zip(record.formats, formats, strict=True)) for formats in product(*among))
        return (record.fits({**record.small, **formats, name: value}) for formats in each_way)

    if any(fits(found)):
        return found
    values = limit.among or dict.fromkeys(map(limit.nearest, range(found, WIDEST + 1)))
    fitting = {value: many for value in values if (many := sum(fits(value)))}
    return min(fitting, key=lambda value: (-fitting[value], abs(value - wanted)), default=found)


def _limit(at: str, name: str, value: Any) -> Limit:
    if name not in known():
        near = get_close_matches(str(name), [*known(), *all_families()], n=1)
        raise LimitsError(
            f"limits: {at}: no such size{f': did you mean {near[0]}?' if near else ''} (known: {', '.join(sorted(known()))})"
        )
    if name in SWITCHES:
        if not isinstance(value, bool):
            raise LimitsError(f"limits: {at}: expected true or false, got {value!r}")
        return Limit((value,))
    words, lowest = _formats().get(name), int(name not in _may_be_zero())
    if isinstance(value, Mapping):
        if words:
            raise LimitsError(f"limits: {at}: expected some of {', '.join(words)}, got {dict(value)!r}")
        limit = _range(at, value, lowest)
    else:
        values = tuple(value) if isinstance(value, list | tuple | set | frozenset | range) else (value,)
        if not values:
            raise LimitsError(f"limits: {at}: expected a value at least, got none")
        for each in values:
            if not (
                each in words if words else isinstance(each, Integral) and not isinstance(each, bool) and int(each) >= lowest
            ):
                expected = f"some of {', '.join(words)}" if words else f"whole numbers from {lowest}"
                raise LimitsError(f"limits: {at}: expected {expected}, got {each!r}")
        limit = Limit(values)
    if name in ONE_AT_LEAST and not limit.allows(1):
        raise LimitsError(f'limits: {at}: expected a limit that 1 lies within, as {{"most": 8}}, got {limit}')
    return limit


def _range(at: str, value: Mapping[Any, Any], lowest: int) -> Limit:
    for name, number in value.items():
        if name not in RANGE:
            raise LimitsError(f"limits: {at}: expected some of {', '.join(RANGE)}, got {name!r}")
        if number is None and name == "most":
            continue
        if not isinstance(number, Integral) or isinstance(number, bool) or number < (name == "multiple_of"):
            raise LimitsError(f"limits: {at}: {name}: expected a whole number, got {number!r}")
    limit = Limit((), value.get("least", 0), value.get("most"), value.get("multiple_of", 1))
    if limit.most is not None and limit.least > limit.most:
        raise LimitsError(f"limits: {at}: least {limit.least} is above most {limit.most}")
    if limit.most is not None and limit.most < lowest:
        raise LimitsError(f"limits: {at}: most: expected a whole number from {lowest}, got {limit.most}")
    nearest = limit.nearest(max(limit.least, lowest))
    if nearest < lowest or not limit.allows(nearest):  # 0 is a multiple of everything
        raise LimitsError(f"limits: {at}: no multiple of {limit.multiple_of} from {limit.least} to {limit.most}")
    return limit


@cache
def _formats() -> dict[str, tuple[str, ...]]:
    """The sizes that are words, and what each may be in any family."""
    found: dict[str, tuple[str, ...]] = {}
    for family in all_families().values():
        for name, among in family.formats.items():
            found[name] = tuple(dict.fromkeys((*found.get(name, ()), *among)))
    return found


@cache
def _may_be_zero() -> frozenset[str]:
    """The sizes that may, in a family or another."""
    return frozenset(name for family in all_families().values() for name in family.may_be_zero)
