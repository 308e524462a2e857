"""The Stream of the quantized cache, by which the laws use it: a stream is one layer."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.counts import MANY, NEGATIVE, Counter
from kvref_conformance.checking.setup import few, formats_of, new, one_of_each_kind, other, pair_of_tokens, tokens
from kvref_conformance.checking.streams import Bad, Stream, wrong_queries
from kvref_conformance.conversation.calls import Own
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.oracle.formats import IN_GROUPS, SYMMETRIC, dim_of, group_of
from kvref_conformance.oracle.rows import Reads, read_as
from kvref_conformance.outcome import NotOffered


def formats_of_tokens(subject: Subject) -> list[str]:
    """Returns INT8 and FP8, or formats of groups (QUANT-10) if the cache has neither. Raises NotOffered if it has no format."""
    try:
        return formats_of(subject, "format", *SYMMETRIC)
    except NotOffered as lacking:
        with suppress(NotOffered):
            if fitting := [name for name in formats_in_groups(subject) if subject.dim % group_of(name) == 0]:
                return fitting
        raise lacking


def formats_in_groups(subject: Subject) -> list[str]:
    """Returns some formats whose group divides an allowed head_dim. Raises NotOffered if there is none."""
    offered = formats_of(subject, "format", *IN_GROUPS)
    if going := [name for name in offered if subject.size("head_dim", 2 * group_of(name)) % group_of(name) == 0]:
        return few(subject, going)
    raise NotOffered(f"a head_dim that is a multiple of {min(map(group_of, offered))}")


class QuantizedStream(Stream):
    family = "quantized"
    layer = 0

    def __init__(self, subject: Subject, **changes: Any) -> None:
        super().__init__(subject, **changes)
        self.given = False

    def give(self, keys: NDArray | Own, values: NDArray | Own) -> None:
        """Appends to layer 0. If only append_step is provided, the first call replaces the cache by one with a single layer."""
        try:
            self.cache.append(self.layer, keys, values)
        except NotOffered:
            if self.given or self.config["num_layers"] == 1:
                raise
            self.cache = new(self.subject, self.family, **self.config | {"num_layers": 1})
            self.config = self.cache.config
            self.cache.append(self.layer, keys, values)
        self.given = True

    def length(self) -> int:
        return int(self.cache.length(self.layer))

    def read(self) -> tuple[NDArray, NDArray]:
        positions = list(range(len(self)))
        try:
            return tuple(self.cache.read_tokens(self.layer, positions))
        except NotOffered:
            if positions:
                raise
            none = tokens(self.subject, 0)  # derived read operations cannot read 0 positions
            return none, none

    def saved_as_is(self) -> Any:
        return self.cache.as_is("save")

    def load(self, data: Any) -> None:
        self.cache.load(data)

    def elsewhere(self) -> Stream:
        return self.fresh(**self.config | {"capacity": self.config["capacity"] + 3})

    def quantizing(self) -> Iterator[Stream]:
        for name in formats_of_tokens(self.subject):
            yield self.fresh(format=name)

    def in_formats(self) -> Iterator[Stream]:
        for name in one_of_each_kind(self.subject, "format"):
            yield self.fresh(format=name, head_dim=dim_of(name))

    def read_as_is(self) -> Any:
        """Reads the first two tokens by whichever read operation is provided."""
        ways: list[tuple[str, tuple[Any, ...]]] = [("read_tokens", ([0, 1],)), ("read_token", (0,)), ("read_head", (0, 0))]
        for name, where in ways:
            with suppress(NotOffered):
                return self.cache.as_is(name, self.layer, *where)
        raise NotOffered("a read operation")

    def expected(self, keys: NDArray, values: NDArray) -> tuple[Reads, Reads]:
        format, scales = self.config["format"], (self.config.get("key_scale"), self.config.get("value_scale"))
        return read_as(keys, format, scales[0]), read_as(values, format, scales[1])

    def numbers(self) -> Iterable[tuple[str, Any]]:
        yield from self.attributes("memory_bytes")
        for layer in range(1, self.config["num_layers"]):
            yield f"length of layer {layer}", self.cache.length(layer)

    def out_of_range(self) -> list[Bad]:
        keys, values = pair_of_tokens(self.subject, 1)
        calls: list[Bad] = []
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

    def other_ways_in(self) -> dict[str, list[tuple[Any, ...]]]:
        subject, layers = self.subject, self.config["num_layers"]
        steps = [
            tokens(subject, layers, dim=subject.dim + 1),
            tokens(subject, layers, heads=other(subject.heads)),
            tokens(subject, other(layers)),
            tokens(subject, layers)[0],
        ]
        queries = wrong_queries(subject)
        return {"append_step": [(step, step) for step in steps], "attend": [(0, query, 1.0) for query in queries]}

    def wrong_use(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        keys, values = pair_of_tokens(self.subject, 1)
        yield from (("append", (layer, keys, values)) for layer in (*(12 * [0]), -1, self.config["num_layers"]))
        yield from (("truncate", (length,)) for length in (*NEGATIVE, MANY, self.room()))
        yield from (("clear", ()), ("clear", ()), ("truncate", (1,)))

    def sizes_for(self, tokens: int) -> dict[str, Any]:
        return {"capacity": tokens}

    def room(self) -> int:
        return int(self.cache.config["capacity"])

    def counters(self, appended: int) -> Iterator[Counter]:
        for layer in range(self.config["num_layers"]):
            yield f"length of layer {layer}", self.cache.length(layer), self.config["capacity"]
