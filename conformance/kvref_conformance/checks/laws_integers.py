"""LAW-20: an integer means the same in any type, now and in later calls."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvref_conformance.checking.expect import true
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import SMALL, batch_major, new, pair_of_tokens
from kvref_conformance.drivers.in_process import Handle, Subject
from kvref_conformance.exchange import show
from kvref_conformance.outcome import Broken, NotOffered

TYPES = (np.int8, np.uint8, np.int16, np.int32, np.int64, np.uint64)
REFUSED = "an error"

Seen = tuple[str, Any]  # what was looked at, and what there was to see


class Typed:
    """Calls with integers of one type. One that is refused is made again with plain integers, as if it had never been made."""

    def __init__(self, subject: Subject, integer: type[Any]) -> None:
        self.subject, self.integer = subject, integer

    def of(self, value: Any) -> Any:
        """An integer in the type, where it has room for it; of lists each, and anything else as it is."""
        if isinstance(value, list):
            return [self.of(each) for each in value]
        if type(value) is not int or self.integer is int:
            return value
        limits = np.iinfo(self.integer)
        return self.integer(value) if limits.min <= value <= limits.max else value

    def new(self, family: str, **changes: Any) -> Handle:
        made: Handle = self._made(lambda **sizes: new(self.subject, family, **sizes), (), SMALL[family] | changes)
        return made

    def call(self, made: Handle, name: str, *args: Any, **named: Any) -> Any:
        """The result, or REFUSED."""
        try:
            return self._made(getattr(made, name), args, named)
        except (Broken, NotOffered):
            raise
        except Exception:
            return REFUSED

    def _made(self, call: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        try:
            with np.errstate(over="ignore"):
                return call(*map(self.of, args), **{name: self.of(value) for name, value in named.items()})
        except (Broken, NotOffered):
            raise
        except Exception:
            return call(*args, **named)


def the_same_in_any_type(subject: Subject, script: Callable[[Typed], Iterator[Seen]]) -> None:
    """Raises Broken where a script, in which sums pass what eight bits hold, shows anything else than with plain integers."""
    subject.in_this_process("integers of NumPy's types")
    plain = list(script(Typed(subject, int)))
    for integer in TYPES:
        for (what, got), (_, want) in zip(script(Typed(subject, integer)), plain, strict=True):
            true(_alike(got, want), f"{what}, with integers of {integer.__name__}", f"{show(want)}, as with plain ones", got)


def _alike(got: Any, want: Any) -> bool:
    if isinstance(want, tuple | list) and isinstance(got, tuple | list):
        return len(got) == len(want) and all(map(_alike, got, want))
    if isinstance(want, np.ndarray):
        return isinstance(got, np.ndarray) and np.array_equal(got, want, equal_nan=want.dtype.kind == "f")
    return bool(got == want)


@check("LAW-20", "contiguous")
def tokens_are_counted_in_any_type(subject: Subject) -> None:
    keys, values = (batch_major(rows) for rows in pair_of_tokens(subject, 110))

    def advancing(typed: Typed) -> Iterator[Seen]:
        cache = typed.new("contiguous", max_seq_len=300, initial_capacity=300)
        for time in range(4):
            yield f"advance(100), time {time + 1}", typed.call(cache, "advance", 100)
            yield f"seq_len after advance(100), time {time + 1}", cache.seq_len

    def growing(typed: Typed) -> Iterator[Seen]:
        cache = typed.new("contiguous", max_seq_len=120, initial_capacity=100)
        yield "appending 110 tokens", typed.call(cache, "append", keys, values)
        yield "capacity of 110 tokens, doubled from 100", cache.capacity
        yield "110 tokens", typed.call(cache, "read")

    the_same_in_any_type(subject, advancing)
    the_same_in_any_type(subject, growing)


@check("LAW-20", "blocks")
def blocks_are_counted_in_any_type(subject: Subject) -> None:
    def script(typed: Typed) -> Iterator[Seen]:
        pool = typed.new("blocks", num_blocks=120)
        held = [pool.allocate() for _ in range(100)]
        for block in held[90:]:
            yield "freeing a block that is held", typed.call(pool, "free", block)
        yield "freeing it again", typed.call(pool, "free", held[95])
        yield "free, used and utilization", (pool.num_free, pool.num_used, pool.utilization)

    the_same_in_any_type(subject, script)


@check("LAW-20", "blocks")
def several_blocks_are_asked_for_in_any_type(subject: Subject) -> None:
    def script(typed: Typed) -> Iterator[Seen]:
        pool = typed.new("blocks", num_blocks=120)
        for count in (100, 100, 20):
            got = typed.call(pool, "allocate_many", count)
            yield f"allocate_many({count})", got if got == REFUSED else len(got)
            yield "free and used", (pool.num_free, pool.num_used)

    the_same_in_any_type(subject, script)


@check("LAW-20", "paged")
def sequences_layers_and_positions_may_be_of_any_type(subject: Subject) -> None:
    keys, values = pair_of_tokens(subject, 130)

    def script(typed: Typed) -> Iterator[Seen]:
        cache = typed.new("paged", num_blocks=100, block_size=16)
        sequence = cache.create()
        for count in (100, 2**64 - 1):
            yield f"ensure_capacity({count})", typed.call(cache, "ensure_capacity", sequence, count)
            yield f"free blocks after ensure_capacity({count})", cache.num_free_blocks
        for start, stop in ((0, 100), (100, 130), (2**63, 1)):
            given = keys[start % 2**63 : stop], values[start % 2**63 : stop]
            yield f"writing from {start} on", typed.call(cache, "write", sequence, 1, start, *given)
            yield f"free blocks and length after writing from {start} on", (cache.num_free_blocks, cache.length(sequence, 1))
        slots = typed.call(cache, "slot_mapping", sequence, 1, 100, 30)
        yield "slots of 100 and the next 29, within their blocks", slots if slots == REFUSED else [slot % 16 for slot in slots]
        yield "positions 120 and 3", typed.call(cache, "read", sequence, 1, [120, 3])
        yield "dropping", typed.call(cache, "drop", sequence)
        yield "free blocks after dropping", cache.num_free_blocks

    the_same_in_any_type(subject, script)


@check("LAW-20", "quantized")
def bytes_are_counted_whatever_the_sizes_are_given_in(subject: Subject) -> None:
    keys, values = pair_of_tokens(subject, 2)

    def script(typed: Typed) -> Iterator[Seen]:
        cache = typed.new("quantized", capacity=100)
        yield "appending to layer 1", typed.call(cache, "append", 1, keys, values)
        yield "length of layer 1", typed.call(cache, "length", 1)
        yield "tokens 1 and 0", typed.call(cache, "read_tokens", 1, [1, 0])
        yield "head 1 of token 1", typed.call(cache, "read_head", 1, 1, 1)
        yield "memory_bytes and fp32_bytes", (cache.memory_bytes, cache.fp32_bytes)

    the_same_in_any_type(subject, script)


@check("LAW-20", "tiered")
def tiers_are_as_long_in_any_type(subject: Subject) -> None:
    keys, values = pair_of_tokens(subject, 150)

    def script(typed: Typed) -> Iterator[Seen]:
        cache = typed.new("tiered", max_tokens=120, tail_length=100, migration_batch=64)
        for part in (slice(0, 75), slice(75, 150)):
            yield "appending 75 tokens", typed.call(cache, "append", keys[part], values[part])
        yield "statistics of 150 tokens", dict(cache.stats())
        yield "tiers of positions", [typed.call(cache, "tier_of", position) for position in (29, 49, 50, 120)]
        yield "150 tokens, 120 of them kept", typed.call(cache, "read")

    the_same_in_any_type(subject, script)


@check("LAW-20", "buffers")
def bytes_and_buffers_are_counted_in_any_type(subject: Subject) -> None:
    def script(typed: Typed) -> Iterator[Seen]:
        pool = typed.new("buffers")
        yield "prewarming with 3", typed.call(pool, "prewarm", 1024, 3)
        yield "prewarming with 100", typed.call(pool, "prewarm", 1024, 100)
        buffer = typed.call(pool, "acquire", 100)
        yield "size of a buffer of 100 bytes", buffer if buffer == REFUSED else buffer.size
        yield "statistics", dict(pool.stats())

    the_same_in_any_type(subject, script)


@check("LAW-20", "pooled")
def blocks_of_tokens_are_as_large_in_any_type(subject: Subject) -> None:
    keys, values = pair_of_tokens(subject, 115)

    def script(typed: Typed) -> Iterator[Seen]:
        cache = typed.new("pooled", tokens_per_block=50, max_tokens=110)
        yield "appending 115 tokens", typed.call(cache, "append", keys, values)
        yield "statistics of 115 tokens", dict(cache.stats())
        yield "115 tokens, those of whole blocks kept", typed.call(cache, "read")

    the_same_in_any_type(subject, script)


@check("LAW-20", "attention")
def a_length_may_be_of_any_type(subject: Subject) -> None:
    query, (keys, values) = pair_of_tokens(subject, 1)[0], pair_of_tokens(subject, 120)

    def script(typed: Typed) -> Iterator[Seen]:
        given = {"scale": 1.0, "causal": False, "length": 100}
        yield "attention over 100 tokens", typed.call(subject.new("attention"), "attention", query, keys, values, **given)

    the_same_in_any_type(subject, script)
