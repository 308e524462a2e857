"""The law adapter of the quantized cache: a stream is one layer."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from kvref_conformance.calls.recorder import OwnArray
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import FORMATS_IN_GROUPS, SYMMETRIC_FORMATS, dim_of, group_of
from kvref_conformance.oracle.formats.per_row import ExpectedReads, read_as
from kvref_conformance.testlib.fixtures import (
    different_size,
    new_object,
    one_format_per_kind,
    random_pair,
    random_tokens,
    sample_formats,
    supported_formats,
)
from kvref_conformance.testlib.law_adapter import (
    LARGEST_JSON_INTEGER,
    NEGATIVE,
    TRUNCATABLE,
    BadCall,
    Counter,
    LawAdapter,
    wrong_queries,
)


def formats_of_tokens(subject: Subject) -> list[str]:
    """Returns INT8 and FP8, or formats of groups (QUANT-10) if the cache has neither. Raises NotOffered if it has no format."""
    try:
        return supported_formats(subject, "format", *SYMMETRIC_FORMATS)
    except NotOffered as lacking:
        with suppress(NotOffered):
            if fitting := [name for name in formats_in_groups(subject) if subject.dim % group_of(name) == 0]:
                return fitting
        raise lacking


def formats_in_groups(subject: Subject) -> list[str]:
    """Returns some formats whose group divides an allowed head_dim. Raises NotOffered if there is none."""
    supported = supported_formats(subject, "format", *FORMATS_IN_GROUPS)
    if fitting := [name for name in supported if subject.size("head_dim", 2 * group_of(name)) % group_of(name) == 0]:
        return sample_formats(subject, fitting)
    raise NotOffered(f"a head_dim that is a multiple of {min(map(group_of, supported))}")


class QuantizedLawAdapter(LawAdapter):
    family = "quantized"
    layer = 0

    def __init__(self, subject: Subject, **changes: Any) -> None:
        super().__init__(subject, **changes)
        self.has_tokens = False

    def append_arrays(self, keys: NDArray | OwnArray, values: NDArray | OwnArray) -> None:
        """Appends to layer 0. If only append_step is provided, the first call replaces the cache by one with a single layer."""
        try:
            self.cache.append(self.layer, keys, values)
        except NotOffered:
            if self.has_tokens or self.config["num_layers"] == 1:
                raise
            self.cache = new_object(self.subject, self.family, **self.config | {"num_layers": 1})
            self.config = self.cache.config
            self.cache.append(self.layer, keys, values)
        self.has_tokens = True

    def length(self) -> int:
        return int(self.cache.length(self.layer))

    def read(self) -> tuple[NDArray, NDArray]:
        positions = list(range(len(self)))
        try:
            return tuple(self.cache.read_tokens(self.layer, positions))
        except NotOffered:
            if positions:
                raise
            none = random_tokens(self.subject, 0)  # derived read operations cannot read 0 positions
            return none, none

    def truncatable(self, tokens: int = TRUNCATABLE) -> Iterator[LawAdapter]:
        for name in formats_of_tokens(self.subject):
            yield self.with_room(tokens, format=name, num_layers=1)

    def save_unconverted(self) -> Any:
        return self.cache.as_is("save")

    def load(self, data: Any) -> None:
        self.cache.load(data)

    def loading_stream(self) -> LawAdapter:
        return self.new_cache(**self.config | {"capacity": self.config["capacity"] + 3})

    def quantizing_streams(self) -> Iterator[LawAdapter]:
        for name in formats_of_tokens(self.subject):
            yield self.new_cache(format=name)

    def scaled_format_streams(self) -> Iterator[LawAdapter]:
        for name in one_format_per_kind(self.subject, "format"):
            yield self.new_cache(format=name, head_dim=dim_of(name))

    def read_unconverted(self) -> Any:
        """Reads the first two tokens by whichever read operation is provided."""
        ways: list[tuple[str, tuple[Any, ...]]] = [("read_tokens", ([0, 1],)), ("read_token", (0,)), ("read_head", (0, 0))]
        for name, where in ways:
            with suppress(NotOffered):
                return self.cache.as_is(name, self.layer, *where)
        raise NotOffered("a read operation")

    def expected(self, keys: NDArray, values: NDArray) -> tuple[ExpectedReads, ExpectedReads]:
        format, scales = self.config["format"], (self.config.get("key_scale"), self.config.get("value_scale"))
        return read_as(keys, format, scales[0]), read_as(values, format, scales[1])

    def scalar_observables(self) -> Iterable[tuple[str, Any]]:
        yield from self.offered_attributes("memory_bytes")
        for layer in range(1, self.config["num_layers"]):
            yield f"length of layer {layer}", self.cache.length(layer)

    def out_of_range_calls(self) -> list[BadCall]:
        keys, values = random_pair(self.subject, 1)
        calls: list[BadCall] = []
        for layer in (-1, self.config["num_layers"]):
            calls += [("LayerOutOfRange", "append", (layer, keys, values))]
            calls += [("LayerOutOfRange", "read_token", (layer, 0)), ("LayerOutOfRange", "length", (layer,))]
            calls += [("LayerOutOfRange", "read_tokens", (layer, []))]
        for position in (-1, len(self)):
            calls += [("PositionOutOfRange", "read_token", (0, position))]
            calls += [("PositionOutOfRange", "read_tokens", (0, [0, position]))]
            calls += [("PositionOutOfRange", "read_head", (0, position, 0))]
        calls += [("PositionOutOfRange", "truncate", (length,)) for length in (-1, len(self) + 1)]
        return calls + [("HeadOutOfRange", "read_head", (0, 0, head)) for head in (-1, self.subject.heads)]

    def other_array_calls(self) -> dict[str, list[tuple[Any, ...]]]:
        subject, layers = self.subject, self.config["num_layers"]
        steps = [
            random_tokens(subject, layers, dim=subject.dim + 1),
            random_tokens(subject, layers, heads=different_size(subject.heads)),
            random_tokens(subject, different_size(layers)),
            random_tokens(subject, layers)[0],
        ]
        queries = wrong_queries(subject)
        return {"append_step": [(step, step) for step in steps], "attend": [(0, query, 1.0) for query in queries]}

    def attend_arguments(self) -> tuple[Any, ...]:
        return (self.layer,)

    def array_calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        calls = [("read_token", (self.layer, 0)), ("read_head", (self.layer, 0, 0))]
        return [*calls, ("read_tokens", (self.layer, list(range(len(self)))))]

    def invalid_calls(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        keys, values = random_pair(self.subject, 1)
        yield from (("append", (layer, keys, values)) for layer in (*(12 * [0]), -1, self.config["num_layers"]))
        yield from (("truncate", (length,)) for length in (*NEGATIVE, LARGEST_JSON_INTEGER, self.room()))
        yield from (("clear", ()), ("clear", ()), ("truncate", (1,)))

    def sizes_for(self, tokens: int) -> dict[str, Any]:
        return {"capacity": tokens}

    def room(self) -> int:
        return int(self.cache.config["capacity"])

    def counters(self, appended: int) -> Iterator[Counter]:
        for layer in range(self.config["num_layers"]):
            yield f"length of layer {layer}", self.cache.length(layer), self.config["capacity"]
