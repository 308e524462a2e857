"""The limits that an implementation declares: the sizes, formats and arguments that it supports.

    limits = {
        "head_dim": [64, 128],                  # one of these
        "block_size": 16,                       # only this
        "num_layers": {"least": 1, "most": 1},  # a range; "multiple_of" may be added, or used alone
        "dtype": ["float16"],                   # of caches, and of all array arguments
        "paged": {"num_kv_heads": {"multiple_of": 2}},  # limits of one family, which take precedence
    }

A check requests convenient sizes and gets the nearest allowed ones. If a clause needs a size that is not allowed, it is *not
offered*, with this reason. An implementation must support every combination of sizes within its limits (LAW-12).
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
from kvref_conformance.oracle.formats import PLAIN_FORMATS, includes_format

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
    "other_eviction_order": "`true` if blocks are evicted in another order than PREFIX-08, GROUP-06 or MOVE-11 defines",
    "null_block": "`true` if block 0 of a cache is reserved, and never contains tokens; `num_blocks` does not count it",
    "repeated_sequences": "`false` if `append` and `append_step` accept each sequence at most once per call",
    "rounded_weights": "`true` if attention rounds its weights to float16 or bfloat16, the only dtype that it accepts (ATTN-04)",
    "settle": "`true` if freed blocks can be allocated only after `settle`, an operation without arguments that the judge calls",
    "tables_alone": "`true` if the cache has block tables but stores no tokens",
    "threads": "`false` if the implementation expects calls of one thread at a time",
    "token_hits": "`true` if hits of a prefix cache contain single tokens after their full blocks (PREFIX-19)",
}
SWITCHES = {
    "negative_integers": True,
    "one_block_table": False,
    "other_eviction_order": False,
    "null_block": False,
    "repeated_sequences": True,
    "rounded_weights": False,
    "settle": False,
    "tables_alone": False,
    "threads": True,
    "token_hits": False,
}  # with their defaults
REFUSALS = ("ConfigError", "ValueError", "AssertionError", "NotImplementedError")  # errors for sizes that are not supported
RANGE_KEYS = ("least", "most", "multiple_of")
MAX_WIDTH = 512  # the largest size that is tried to find one that fits a format's groups
AT_LEAST_ONE = ("tokens", "sequences")  # limits that must allow 1: the last call of a split append may have one token


class LimitsError(Exception):
    """Limits are malformed or contradictory. The message has what was expected and what was found."""


@dataclass(frozen=True)
class Limit:
    """The limit of one size. among: the allowed values, or empty for a range given by the other fields."""

    among: tuple[Any, ...] = ()
    least: int = 0
    most: int | None = None
    multiple_of: int = 1

    def allows(self, value: Any) -> bool:
        """Whether the value is allowed."""
        if self.among:
            return value in self.among
        if isinstance(value, str):
            return True
        return bool(value >= self.least and (self.most is None or value <= self.most) and value % self.multiple_of == 0)

    @property
    def largest(self) -> int | None:
        """The largest allowed value; None if there is no maximum."""
        return max(self.among) if self.among else self.most

    @property
    def smallest(self) -> int:
        """The smallest allowed value."""
        return min(self.among) if self.among else self.least

    def largest_up_to(self, wanted: int) -> int | None:
        """The largest allowed value in [1, wanted], or None."""
        if self.among:
            return max((each for each in self.among if 0 < each <= wanted), default=None)
        found = min(wanted, wanted if self.most is None else self.most) // self.multiple_of * self.multiple_of
        return found if found >= max(self.least, 1) else None

    def nearest(self, wanted: Any) -> Any:
        """The allowed value nearest to the wanted one; in a range, the next larger one if it exists. For names, the first one."""
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

    def smallest_from(self, wanted: int) -> Any:
        """The smallest allowed value of at least `wanted`; the nearest one if there is none."""
        return self.nearest(min((each for each in self.among if each >= wanted), default=wanted))

    def __str__(self) -> str:
        if self.among:
            return " or ".join(map(str, self.among))
        parts = [f"at least {self.least}"] if self.least else []
        parts += [f"at most {self.most}"] if self.most is not None else []
        parts += [f"a multiple of {self.multiple_of}"] if self.multiple_of > 1 else []
        return ", ".join(parts) or "any"


UNLIMITED = Limit()
DEFAULT_LIMITS = {"recurrent": Limit((0,))}  # of sizes that an implementation supports only if it declares so


@cache
def all_limits() -> frozenset[str]:
    """The names of all limits: the sizes of the families, and ARGUMENTS."""
    return frozenset(ARGUMENTS).union(*(family.small for family in all_families().values()))


class Limits:
    """The limits of one implementation. Raises LimitsError if they are malformed or contradictory.

    declared: its `limits`. formats: its formats, if known; then sizes are chosen that are multiples of a format's groups.
    """

    def __init__(self, declared: Any = None, formats: Collection[str] | None = None) -> None:
        if declared is not None and not isinstance(declared, Mapping):
            raise LimitsError(f"limits: expected a mapping of names to limits, got {declared!r}")
        self.declared: dict[str, Any] = dict(declared or {})
        self.formats = formats
        self._formats: dict[str, tuple[tuple[str, ...], ...]] = {}  # by family, the supported values of each format argument
        self._common: dict[str, Limit] = {}
        self._by_family: dict[str, dict[str, Limit]] = {}
        for name, value in self.declared.items():
            if name in all_families():
                if not isinstance(value, Mapping):
                    raise LimitsError(f"limits: {name}: expected a mapping of names to limits, got {value!r}")
                self._by_family[name] = {each: _parse_limit(f"{name}.{each}", each, of) for each, of in value.items()}
            else:
                self._common[name] = _parse_limit(name, name, value)

        self._require_consistent()

    def _require_consistent(self) -> None:
        """Raise LimitsError if a size that must be at least the sum of others can never be large enough."""
        for family in all_families().values():
            for whole, parts in family.holds.items():
                most, least = (
                    self.limit(family.name, whole).largest,
                    sum(self.limit(family.name, part).smallest for part in parts),
                )
                if most is not None and least > most:
                    raise LimitsError(
                        f"limits: {whole}: at most {most}, but {family.name} needs at least {least} for {' and '.join(parts)}"
                    )

    def limit(self, family: str, name: str) -> Limit:
        """The limit of a size or argument of a family. Without a declaration, it allows everything, except for DEFAULT_LIMITS."""
        return self._by_family.get(family, {}).get(name) or self._common.get(name) or DEFAULT_LIMITS.get(name, UNLIMITED)

    def allows_format(self, family: str, name: str, format: str) -> bool:
        """Whether a format argument of a family may have this value: the format is offered, and within the limits."""
        offered = self.formats is None or includes_format(self.formats, format)
        plain = format not in PLAIN_FORMATS or format in self.dtypes(family)
        return offered and plain and self.limit(family, name).allows(format)

    def nearest(self, family: str, name: str, wanted: Any) -> Any:
        """The allowed value nearest to the wanted one, if possible one that fits the groups of an offered format."""
        record, limit = all_families().get(family), self.limit(family, name)
        if record is None or not record.formats or name not in record.small or name in record.formats:
            return limit.nearest(wanted)
        if family not in self._formats:
            of_each = record.formats.items()
            self._formats[family] = tuple(
                tuple(each for each in of if self.allows_format(family, size, each)) for size, of in of_each
            )
        return _nearest_fitting(family, name, limit, wanted, self._formats[family])

    def sizes(self, family: Family, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """The numeric sizes among `wanted`, each replaced by the nearest allowed value that is consistent with the others."""
        sizes = [name for name in wanted if name in family.small and name not in family.formats]
        near = {name: self.nearest(family.name, name, wanted[name]) for name in sizes}
        if "num_blocks" in near and self.switch(family.name, "one_block_table"):  # one of its blocks contains all layers
            layers = near["num_layers"]
            near["num_blocks"] = layers * self.nearest(family.name, "num_blocks", wanted["num_blocks"] // layers)
        for whole, parts in family.holds.items():
            near[whole] = self.limit(family.name, whole).smallest_from(max(near[whole], sum(near[part] for part in parts)))
        for whole, part in family.multiples.items():
            if {whole, part} <= near.keys():
                near[part] = self.nearest(family.name, part, gcd(near[whole], near[part]))
                near[whole] = self.nearest(family.name, whole, -(-near[whole] // near[part]) * near[part])
        return near

    def exceeded_sizes(self, family: str, config: Mapping[str, Any]) -> str:
        """The sizes of an object that exceed the limits, as text; "" if all are allowed."""
        found = list[str]()
        for name in all_families()[family].small:
            shared = name == "num_blocks" and self.switch(family, "one_block_table")  # one of its blocks contains all layers
            own = config[name] // config["num_layers"] if shared else config[name]
            if not self.limit(family, name).allows(own):
                found.append(f"{name} {own}, where its limits say {self.limit(family, name)}")
        return "; ".join(found)

    def switch(self, family: str, name: str) -> bool:
        """The value of one of SWITCHES."""
        limit = self.limit(family, name)
        return bool(limit.among[0]) if limit.among else SWITCHES[name]

    def dtypes(self, family: str) -> tuple[str, ...]:
        """The dtypes that array arguments may have. The judge uses the first."""
        limit = self.limit(family, "dtype")
        return (
            tuple(name for name in PLAIN_FORMATS if name in limit.among) or PLAIN_FORMATS
        )  # a limit to quantized formats does not restrict it


def describe_refusal(family: str, kind: str, message: str) -> str:
    """The error that a factory raised for valid sizes, with the limits that would exclude the sizes that its message names."""
    words = message.replace(" ", "_")
    named = [name for name in all_families()[family].small if name in words]
    if not named and kind not in REFUSALS:
        return f"{kind}: {message}"
    limits = ", ".join(f'"{name}": ...' for name in named) or "..."
    return f'{kind}: {message} (to exclude unsupported sizes, declare limits = {{"{family}": {{{limits}}}}})'


@cache
def _nearest_fitting(family: str, name: str, limit: Limit, wanted: Any, among: tuple[tuple[str, ...], ...]) -> Any:
    """The nearest allowed value of a size; if it fits no offered format, the nearest of those that fit the most formats.

    among: the supported values of each format argument of the family.
    """
    record, found = all_families()[family], limit.nearest(wanted)

    def fits(value: int) -> Iterator[bool]:
        each_way = (dict(zip(record.formats, formats, strict=True)) for formats in product(*among))
        return (record.fits({**record.small, **formats, name: value}) for formats in each_way)

    if any(fits(found)):
        return found
    values = limit.among or dict.fromkeys(map(limit.nearest, range(found, MAX_WIDTH + 1)))
    fitting = {value: many for value in values if (many := sum(fits(value)))}
    return min(fitting, key=lambda value: (-fitting[value], abs(value - wanted)), default=found)


def _parse_limit(at: str, name: str, value: Any) -> Limit:
    """Parse one declared limit. at: its name in messages. Raises LimitsError."""
    if name not in all_limits():
        near = get_close_matches(str(name), [*all_limits(), *all_families()], n=1)
        raise LimitsError(
            f"limits: {at}: no such size{f': did you mean {near[0]}?' if near else ''} (known: {', '.join(sorted(all_limits()))})"
        )
    if name in SWITCHES:
        if not isinstance(value, bool):
            raise LimitsError(f"limits: {at}: expected true or false, got {value!r}")
        return Limit((value,))
    words, lowest = _format_arguments().get(name), int(name not in _sizes_that_may_be_zero())
    if isinstance(value, Mapping):
        if words:
            raise LimitsError(f"limits: {at}: expected some of {', '.join(words)}, got {dict(value)!r}")
        limit = _parse_range(at, value, lowest)
    else:
        values = tuple(value) if isinstance(value, list | tuple | set | frozenset | range) else (value,)
        if not values:
            raise LimitsError(f"limits: {at}: expected at least one value, got none")
        for each in values:
            if not (
                each in words if words else isinstance(each, Integral) and not isinstance(each, bool) and int(each) >= lowest
            ):
                expected = f"some of {', '.join(words)}" if words else f"integers of at least {lowest}"
                raise LimitsError(f"limits: {at}: expected {expected}, got {each!r}")
        limit = Limit(values)
    if name in AT_LEAST_ONE and not limit.allows(1):
        raise LimitsError(f'limits: {at}: expected a limit that allows 1, such as {{"most": 8}}, got {limit}')
    return limit


def _parse_range(at: str, value: Mapping[Any, Any], lowest: int) -> Limit:
    for name, number in value.items():
        if name not in RANGE_KEYS:
            raise LimitsError(f"limits: {at}: expected some of {', '.join(RANGE_KEYS)}, got {name!r}")
        if number is None and name == "most":
            continue
        if not isinstance(number, Integral) or isinstance(number, bool) or number < (name == "multiple_of"):
            lowest_number = int(name == "multiple_of")
            raise LimitsError(f"limits: {at}: {name}: expected an integer of at least {lowest_number}, got {number!r}")
    limit = Limit((), value.get("least", 0), value.get("most"), value.get("multiple_of", 1))
    if limit.most is not None and limit.least > limit.most:
        raise LimitsError(f"limits: {at}: least {limit.least} is above most {limit.most}")
    if limit.most is not None and limit.most < lowest:
        raise LimitsError(f"limits: {at}: most: expected an integer of at least {lowest}, got {limit.most}")
    nearest = limit.nearest(max(limit.least, lowest))
    if nearest < lowest or not limit.allows(nearest):  # 0 is a multiple of everything
        raise LimitsError(f"limits: {at}: no multiple of {limit.multiple_of} from {limit.least} to {limit.most}")
    return limit


@cache
def _format_arguments() -> dict[str, tuple[str, ...]]:
    """The format arguments, with the values that each may have in any family."""
    found: dict[str, tuple[str, ...]] = {}
    for family in all_families().values():
        for name, among in family.formats.items():
            found[name] = tuple(dict.fromkeys((*found.get(name, ()), *among)))
    return found


@cache
def _sizes_that_may_be_zero() -> frozenset[str]:
    """The sizes that may be 0 in any family."""
    return frozenset(name for family in all_families().values() for name in family.may_be_zero)
