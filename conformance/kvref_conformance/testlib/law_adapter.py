"""The interface through which the laws use a family, and assertions about what they observe."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.recorder import OwnArray
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.families import all_families
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.expectations import exact_reads
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.testlib.assertions import assert_equal, assert_reads, assert_same, assert_true, blaming
from kvref_conformance.testlib.fixtures import different_size, new_object, random_pair, random_tokens, supports

LARGEST_JSON_INTEGER = 2**53 - 1  # the largest integer that every JSON parser represents exactly
NEGATIVE = (-1, -3, -LARGEST_JSON_INTEGER)
Counter = tuple[str, Any, float]  # its name, its value, its maximum


def call_tolerating_errors(call: Callable[..., Any], *args: Any) -> None:
    """Make a call that may raise any error, or may not be offered. Raises ClauseViolation if it does not return."""
    try:
        call(*args)
    except ClauseViolation:
        raise
    except Exception:
        return


def assert_counters_within_bounds(counters: Iterable[Counter], after: str) -> None:
    """Raise ClauseViolation if a counter is negative or exceeds its maximum."""
    for name, number, most in counters:
        assert_true(0 <= number <= most, f"{name} after {after}", f"a number in [0, {most}]", number)


# The interface through which the laws use a family: tokens are appended, read and cleared, and all state can be observed.
#
# Each family to which tokens can be appended has a subclass of `LawAdapter` in law_adapter.py. Members that are left undefined
# are optional facts. A law that needs a fact runs on the families that define it.


def unknown_ids(subject: Subject, id: int) -> list[int]:
    """Ids that are not the existing `id`: far ones, and ones that equal it in an integer of 8, 16, 31, 32 or more bits."""
    wide = () if subject.by_value else (53, 63, 64)  # JSON and some languages lack these
    return [*subject.integers(-1), id + 10**6, *(id + 2**bits for bits in (8, 16, 31, 32, *wide))]


BadCall = tuple[str, str, tuple[Any, ...]]  # the error's kind, and the method and arguments that must raise it


SHAPE_SIZES = ("num_layers", "num_kv_heads", "head_dim", "rank", "rope_dim", "window")  # sizes that must match to load a file
TRUNCATABLE = 9  # tokens: as many as the checks of `truncate` append, except at production sizes
MANY_TOKENS = 11  # tokens: more than a block, a tail or an initial capacity contains


class LawAdapter(ABC):
    """One cache, or one sequence and layer of a cache, to which tokens [n, heads, dim] are appended."""

    family: ClassVar[str]

    def __init__(self, subject: Subject, **changes: Any) -> None:
        self.subject = subject
        self.cache: ObjectProxy = new_object(subject, self.family, **changes)
        self.config = self.cache.config
        self.num_appended = 0  # tokens appended since it was created or cleared

    def new_cache(self, **changes: Any) -> "LawAdapter":
        """A stream of a new cache."""
        return type(self)(self.subject, **changes)

    def sibling(self) -> "LawAdapter":
        """A second stream that shares as much as possible with this one, for example its pool."""
        return self.new_cache()

    def tokens(self, count: int) -> tuple[NDArray, NDArray]:
        """Random keys and values [n, heads, dim] of `count` tokens. A family may have other parts than keys and values."""
        return random_pair(self.subject, count, self.config.get("num_kv_heads"), self.config.get("head_dim"))

    def to_cache_layout(self, tokens: NDArray) -> NDArray:
        """Tokens [n, heads, dim] in the layout that the cache accepts."""
        return tokens

    def append_arrays(self, keys: NDArray | OwnArray, values: NDArray | OwnArray) -> None:
        """Append arrays that are in the cache's layout already, or for which the cache must raise."""
        self.cache.append(keys, values)

    def append(self, keys: NDArray, values: NDArray) -> None:
        self.require_room(len(keys))
        self.append_arrays(self.to_cache_layout(keys), self.to_cache_layout(values))
        self.num_appended += len(keys)

    def require_room(self, count: int) -> None:
        """Raise NotOffered if the limits leave no room for `count` more tokens. Uses the check's own count, not the cache's."""
        if self.subject.limits.declared and (wanted := self.num_appended + count) > self.room():
            raise NotOffered(f"room for {wanted} tokens, where its limits leave {self.room()}")

    def __len__(self) -> int:
        with self.subject.quiet_reads():
            return int(self.length())

    @abstractmethod
    def length(self) -> int: ...

    def read(self) -> tuple[NDArray, NDArray]:
        """Keys and values [n, heads, dim]."""
        return tuple(self.cache.read())

    def clear(self) -> None:
        """Remove all tokens."""
        self.cache.clear()
        self.num_appended = 0

    def expected(self, keys: NDArray, values: NDArray) -> tuple[ExpectedReads, ExpectedReads]:
        """The expected values of `read` for appended tokens, computed by the oracle, while none is evicted."""
        return exact_reads(keys), exact_reads(values)

    def all_observables(self) -> dict[str, Any]:
        """All observables of the stream, by name."""
        with self.subject.quiet_reads():
            seen: dict[str, Any] = {"length": len(self)}
            seen["keys"], seen["values"] = (np.array(part) for part in self.read())
            return seen | dict(self.scalar_observables())

    def contents(self) -> dict[str, Any]:
        """The observables that do not depend on how much memory the contents use."""
        memory = ("num_free_blocks", "utilization", "blocks of", "capacity")
        return {name: value for name, value in self.all_observables().items() if not name.startswith(memory)}

    @abstractmethod
    def scalar_observables(self) -> Iterable[tuple[str, Any]]:
        """(name, value) of all observables other than the tokens and their number."""

    def offered_attributes(self, *names: str) -> Iterator[tuple[str, Any]]:
        """(name, value) of the attributes that are offered."""
        for name in names:
            try:
                yield name, getattr(self.cache, name)
            except NotOffered:
                continue

    def overwrite(self, keys: NDArray, values: NDArray) -> None:  # noqa: B027 - most caches cannot
        """Overwrite the first tokens, if the family supports it."""

    def wrong_shapes(self) -> list[tuple[NDArray, NDArray]]:
        """Keys and values of wrong shapes, for which the cache must raise."""
        subject = self.subject
        count = subject.size("tokens", 2)
        good, more = (self.to_cache_layout(random_tokens(subject, each)) for each in (count, count + 1))
        few_heads = self.to_cache_layout(random_tokens(subject, count, heads=different_size(subject.heads)))
        wide = self.to_cache_layout(random_tokens(subject, count, dim=subject.dim + 1))
        narrow = self.to_cache_layout(random_tokens(subject, count, dim=different_size(subject.dim)))
        bad = [(few_heads, few_heads), (wide, wide), (narrow, narrow), (good, narrow), (good, few_heads)]
        bad += [(good, more)] if subject.size("tokens", count + 1) > count else []
        return [*bad, (good.reshape(-1), good.reshape(-1)), (good[None], good[None]), (good[..., 0], good[..., 0])]

    # Optional facts. Laws that need a fact do not run on families that do not override its member.

    def out_of_range_calls(self) -> list[BadCall]:
        """Calls with a layer, head, position or sequence that does not exist."""
        return []

    def other_array_calls(self) -> dict[str, list[tuple[Any, ...]]]:
        """Other methods with array arguments, each with lists of arguments in which only a shape is wrong."""
        raise NotImplementedError

    def array_calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        """Calls of a stream with tokens that return arrays or lists, which no later call may change."""
        raise NotImplementedError

    def attend_arguments(self) -> tuple[Any, ...]:
        """The arguments of `attend` before the query. A single query sees every token that `read` returns."""
        raise NotImplementedError

    def query(self) -> NDArray:
        """One query for `attend`."""
        return random_tokens(
            self.subject, 1, self.config["num_kv_heads"] * self.subject.size("group_size", 1), self.config["head_dim"]
        )

    def invalid_calls(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Invalid calls, most of which must raise."""
        raise NotImplementedError

    def counters(self, appended: int) -> Iterator[Counter]:
        """The counters, with their maxima after at most `appended` tokens. A dropped sequence has none."""
        raise NotImplementedError

    def sizes_for(self, tokens: int) -> dict[str, Any]:
        """The sizes of a cache in which a stream has room for this number of tokens, if the limits allow them."""
        raise NotImplementedError

    def room(self) -> int:
        """The number of tokens that the stream can contain before an append raises or tokens are evicted."""
        raise NotImplementedError

    def quantizing_streams(self) -> "Iterator[LawAdapter]":
        """New streams that quantize tokens when they are appended, one per format."""
        raise NotImplementedError

    def scaled_format_streams(self) -> "Iterator[LawAdapter]":
        """New streams in formats with scales, one per kind of format, with sizes that are multiples of the format's groups."""
        raise NotImplementedError

    def truncatable(self, tokens: int = TRUNCATABLE) -> "Iterator[LawAdapter]":
        """New streams with room for `tokens` tokens, whose truncation is exact (EDIT-06), one per format and layout."""
        raise NotImplementedError

    def truncate_arguments(self, length: int) -> tuple[int, ...]:
        return (length,)

    def truncate(self, length: int) -> None:
        self.cache.truncate(*self.truncate_arguments(length))
        self.num_appended = length

    def with_room(self, tokens: int, **changes: Any) -> "LawAdapter":
        """A stream of a new cache, with other sizes if `tokens` tokens do not fit the small ones."""
        return self.new_cache(**(self.sizes_for(tokens) if tokens > TRUNCATABLE else {}) | changes)

    def save(self) -> Any:
        """The result of `save`, uint8 [n]."""
        return np.array(self.subject.numpy(self.save_unconverted()))

    def save_unconverted(self) -> Any:
        """The result of `save`, as an array of the implementation's own type."""
        raise NotImplementedError

    def load(self, data: Any) -> None:
        """Load saved data into this stream."""
        raise NotImplementedError

    def loading_stream(self) -> "LawAdapter":
        """A new stream that can load the data of this one. Sizes that do not matter for loading differ (MOVE-02)."""
        return self.new_cache()

    def incompatible_streams(self) -> "Iterator[LawAdapter]":
        """New streams that must not load the data of this one: with another layer, head or element, or another format."""
        record = all_families()[self.family]
        sizes = [(name, self.config[name] + 1) for name in SHAPE_SIZES if name in self.config]
        formats = [(name, each) for name, among in record.formats.items() for each in among if each != self.config[name]]
        for name in dict.fromkeys(name for name, _ in (*sizes, *formats)):
            others = (self.config | {name: value} for each, value in (*sizes, *formats) if each == name)
            fitting = (other for other in others if supports(self.subject, name, other[name]) and record.together(other))
            if (config := next(fitting, None)) is not None:
                yield self.new_cache(**config)

    def read_unconverted(self) -> Any:
        """Keys and values as arrays of the implementation's own type, in memory that no later call overwrites."""
        raise NotImplementedError


def wrong_pairs(subject: Subject) -> list[tuple[NDArray, NDArray]]:
    """Keys and values of one token, in which only a shape is wrong."""
    wide, few_heads = (
        random_tokens(subject, 1, dim=subject.dim + 1),
        random_tokens(subject, 1, heads=different_size(subject.heads)),
    )
    flat = random_tokens(subject, 1)[0]
    good, two = random_tokens(subject, 1), random_tokens(subject, 2)
    return [(wide, wide), (few_heads, few_heads), (flat, flat), (two, two), (good, wide), (good, two)]


def wrong_queries(subject: Subject) -> list[NDArray]:
    """Queries of a wrong width, with too few axes, and with a number of heads that is no multiple of several kv heads."""
    uneven = [random_tokens(subject, 1, heads=subject.heads + 1)] if subject.heads > 1 else []
    return [random_tokens(subject, 1, dim=subject.dim + 1), random_tokens(subject, 1)[0], *uneven]


def overrides(stream: type[LawAdapter], fact: str) -> bool:
    """Whether the class overrides an optional member of `LawAdapter`."""
    return getattr(stream, fact) is not getattr(LawAdapter, fact)


def fill_stream(stream: LawAdapter, count: int = MANY_TOKENS) -> tuple[LawAdapter, NDArray, NDArray]:
    """Append `count` tokens. Returns the stream and the tokens."""
    keys, values = stream.tokens(count)
    stream.append(keys, values)
    return stream, keys, values


def assert_tokens_kept(stream: LawAdapter, keys: NDArray, values: NDArray, when: str) -> None:
    """Raise ClauseViolation of LAW-04 unless the stream contains exactly these tokens.

    A law that compares tokens with the appended ones after a call uses it before the call, so that it does not blame the call
    for a token that was lost earlier. when: for example "before invalid calls".
    """
    with blaming("LAW-04"):
        assert_reads(stream.subject, stream.read(), stream.expected(keys, values), f"the {len(keys)} tokens {when}")


def assert_whole_appends_kept(stream: LawAdapter, count: int, when: str) -> None:
    """Raise ClauseViolation of LAW-04 unless a new cache keeps `count` tokens that are appended to it."""
    assert_tokens_kept(*fill_stream(stream.new_cache(), count), f"of a new cache, {when}")


def assert_same_observables(got: dict[str, Any], want: dict[str, Any], when: str) -> None:
    """Raise ClauseViolation unless two observations of a stream are equal."""
    for name in want:
        (assert_same if name in ("keys", "values") else assert_equal)(got[name], want[name], f"{name} {when}")
