"""The tiered cache: the newest tokens at full precision, older ones quantized, the oldest forgotten.

    append -> [ tail ] -> [ warm tier, if there is one ] -> [ store ] -> evicted

Tokens enter the tail. Those it has no room for move on, oldest first and at most `migration_batch` at a time, into the warm tier
if there is one and from there into the store, each time quantized from what they read as where they were. Past `max_tokens` the
oldest are evicted. Positions are absolute: eviction never renumbers.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import RLock
from typing import BinaryIO

import numpy as np

from kvref.array import Array
from kvref.attention import attention_as_read
from kvref.backend import Backend, reference
from kvref.buffers import VALUE_BYTES, Buffer, BufferPool
from kvref.contents import Contents, Saved, Stretch, both, shape_of
from kvref.errors import ConfigError, NonFinite, NotTruncatable, PositionOutOfRange, in_range, whole_fields
from kvref.formats import FORMATS, PLAIN_DTYPES, SCALED_FORMATS, get_format
from kvref.inputs import accept_pair
from kvref.slots import TokenStore
from kvref.tiers import Run, Tier, check_way, runs_said
from kvref.transfer import Movable

MAGNITUDES_BELOW = 2.0**126  # of what is taken: no tier's rounding then takes a value, or a range, past float32 (TIER-13)
POLICY = ("tail_length", "tail_dtype", "warm_length", "warm_format", "store_format")


@dataclass(frozen=True)
class TieredConfig:
    """Lengths in tokens. The five policy fields (POLICY) can change later, by update_policy.

    tail_dtype: float32, float16 or bfloat16. warm_format, store_format: any with a scale whose groups go into head_dim (TIER-17);
    one that would be given is 1.0.

    The policy has three forms (TIER-15): tail_length = max_tokens keeps everything in the tail, and nothing is quantized;
    tail_length = 0 has no tail, and tokens are quantized as they come; anything between is the hybrid.
    """

    num_kv_heads: int = 8
    head_dim: int = 128
    max_tokens: int = 4096
    tail_length: int = 256
    tail_dtype: str = "float16"
    warm_length: int = 0
    warm_format: str = "q8"
    store_format: str = "q4"
    migration_batch: int = 64

    def __post_init__(self) -> None:
        whole_fields(self, "num_kv_heads", "head_dim", "max_tokens", "migration_batch")
        whole_fields(self, "tail_length", "warm_length", minimum=0)
        if self.tail_length + self.warm_length > self.max_tokens:
            room = f"tail_length {self.tail_length} + warm_length {self.warm_length}"
            raise ConfigError(f"expected tail and warm tier within max_tokens {self.max_tokens}, got {room}")
        get_format(self.tail_dtype, among=PLAIN_DTYPES)
        for name in (self.warm_format, self.store_format):
            get_format(name, among=SCALED_FORMATS).code_width(self.head_dim)  # which says whether it has groups of whole width


@dataclass(frozen=True)
class TieredStats:
    """Tokens and bytes really stored, by tier; ratio: what float32 would take / that, 1.0 when empty (TIER-08)."""

    total_tokens: int
    tail_tokens: int
    warm_tokens: int
    store_tokens: int
    tail_bytes: int
    warm_bytes: int
    store_bytes: int
    compression_ratio: float


class TieredCache(Movable):
    _moved = ("_tiers", "_next", "_moved_at")

    def __init__(self, config: TieredConfig, backend: Backend = reference) -> None:
        self._backend = backend
        self._lock = RLock()
        self._tiers = [Tier("tail"), Tier("warm"), Tier("store")]
        self._next = 0  # the position of the next token appended
        self._moved_at = 0  # what that was when tokens last moved on, or were evicted
        self._adopt(config)

    def append(self, keys: Array, values: Array) -> None:
        """Append n tokens, keys and values [n, num_kv_heads, head_dim].

        Raises ShapeMismatch, DtypeMismatch, or NonFinite for a value that some tier of the policy cannot hold (TIER-13, TIER-18).
        """
        shape = ("n", self.config.num_kv_heads, self.config.head_dim)
        keys, values = accept_pair(keys, values, shape, self._backend)
        with self._lock:
            self._check_storable("keys", keys)
            self._check_storable("values", values)
            check_way(keys, values, [tier.runs[-1].store for tier in self._tiers if tier.room])
            count, room, batch = keys.shape[0], self.config.max_tokens, self.config.migration_batch
            if (past := self.total_tokens + count - room) > 0:
                self._evict(past)
                self._moved_at = self._next + count
            forgotten = max(0, count - room)  # the head of an append longer than the cache (TIER-05)
            self._next += forgotten
            newest = next(tier for tier in self._tiers if tier.room)
            for start in range(forgotten, count, batch):
                piece = slice(start, min(start + batch, count))
                newest.write(keys[piece, ...], values[piece, ...])
                self._next += piece.stop - piece.start
                self._settle()

    def read(self) -> tuple[Array, Array]:
        """Every token, store first and oldest first, float32 [total, num_kv_heads, head_dim] (TIER-03)."""
        with self._lock:
            return self._read(0, self.total_tokens)

    def _read(self, start: int, stop: int) -> tuple[Array, Array]:
        """Tokens counted from the oldest one."""
        empty = self._backend.zeros((0, self.config.num_kv_heads, self.config.head_dim), "float32")
        parts = [(empty, empty)]
        for tier in reversed(self._tiers):
            parts += tier.read(start, stop)
            start, stop = start - len(tier), stop - len(tier)
        keys, values = (self._backend.xp.concat(list(each), axis=0) for each in zip(*parts, strict=True))
        return keys, values

    def read_into(self, pool: BufferPool) -> tuple[Buffer, Buffer]:
        """What `read` gives, flat, in two buffers of the pool. The caller releases them. Raises BufferTooLarge."""
        keys, values = (self._backend.xp.reshape(part, (-1,)) for part in self.read())
        buffers = pool.acquire_pair(VALUE_BYTES * keys.shape[0])
        try:
            buffers[0].extend(keys)
            buffers[1].extend(values)
        except BaseException:
            for buffer in buffers:
                buffer.release()
            raise
        return buffers

    def attend(self, query: Array, scale: float | None = None, causal: bool = False) -> Array:
        """Attention of query [num_queries, num_query_heads, head_dim] over what the cache reads as, a head at a time."""
        row = self.config.num_kv_heads, self.config.head_dim
        with self._lock:
            return attention_as_read(query, self._read, self.total_tokens, row, scale=scale, causal=causal, backend=self._backend)

    def tier_of(self, position: int) -> str:
        """ "tail", "warm" or "store". Raises PositionOutOfRange for a token evicted or not yet appended (TIER-07)."""
        with self._lock:
            first = self._next - self.total_tokens
            position = in_range(position, self._next, PositionOutOfRange, "position")
            if position < first:
                raise PositionOutOfRange(f"position {position} was evicted: positions [{first}, {self._next}) remain")
            age = self._next - 1 - position
            for tier in self._tiers[:-1]:
                if age < len(tier):
                    return tier.name
                age -= len(tier)
            return self._tiers[-1].name

    @property
    def total_tokens(self) -> int:
        with self._lock:
            return sum(len(tier) for tier in self._tiers)

    def stats(self) -> TieredStats:
        with self._lock:
            tokens, sizes = [len(tier) for tier in self._tiers], [tier.bytes for tier in self._tiers]
            float32 = 8 * self.config.num_kv_heads * self.config.head_dim * sum(tokens)
            ratio = float32 / sum(sizes) if float32 else 1.0
            return TieredStats(sum(tokens), tokens[0], tokens[1], tokens[2], sizes[0], sizes[1], sizes[2], ratio)

    def update_policy(self, **changes: int | str) -> None:
        """Change policy fields; the new policy holds at once (TIER-10).

        Tokens a shorter tail has no room for migrate now; a new format is for tokens that enter a tier later. Raises ConfigError,
        and NonFinite where a token that is held could not move on (TIER-18), with nothing changed.
        """
        for name in changes:
            if name not in POLICY:
                raise ConfigError(f"update_policy: expected {', '.join(POLICY)}, got {name!r}")
        with self._lock:
            self._adopt(replace(self.config, **changes))  # type: ignore[arg-type]  # checked by TieredConfig
            self._settle()
            for tier in self._tiers:
                tier.drop_drained()

    def truncate(self, length: int) -> None:
        """Forget the tokens at positions `length` and past it, as if they had never come (EDIT-01, EDIT-03).

        Raises PositionOutOfRange for more than came, and NotTruncatable where some of those tokens have pushed others on: what
        was quantized, or evicted, to make room for them is not to be had back (EDIT-06).
        """
        with self._lock:
            length = in_range(length, self._next + 1, PositionOutOfRange, "length")
            if length < self._moved_at:
                raise NotTruncatable(f"cannot truncate to {length}: tokens last moved to another tier at length {self._moved_at}")
            count, self._next = self._next - length, length
            for tier in self._tiers:
                count -= tier.take_back(min(count, len(tier)))

    def clear(self) -> None:
        """Forget every token; positions start from 0 again."""
        with self._lock:
            self._next = self._moved_at = 0
            for tier in self._tiers:
                tier.let_go(len(tier))

    def contents(self) -> Contents:
        """What is saved: every token in the tier and the format that it is in."""
        with self._lock:
            tiers = {tier.name: [run.said() for run in tier.runs] for tier in self._tiers}
            state = {"next": self._next, "moved_at": self._moved_at, "tiers": tiers}
            return Contents("tiered", shape_of(self.config), state, self._stretches())

    def receive(self, file: BinaryIO) -> None:
        with self._lock:
            super().receive(file)

    def _another(self) -> "TieredCache":
        return TieredCache(self.config, self._backend)

    def _make_room(self, saved: Saved) -> Sequence[Stretch]:
        self._next = saved.number("next")
        self._moved_at = saved.number("moved_at", most=self._next)
        tiers, config = saved.state.get("tiers"), self.config
        for tier in self._tiers:
            said = tiers.get(tier.name) if isinstance(tiers, dict) else None
            tier.runs = deque(runs_said(said, config.max_tokens, config.num_kv_heads, config.head_dim, self._backend))
        return self._stretches()

    def _stretches(self) -> list[Stretch]:
        runs = [(f"{tier.name}.{at}", run) for tier in self._tiers for at, run in enumerate(tier.runs)]
        return [each for name, run in runs for each in both(name, run.store, np.array(run.slots(run.start, run.stop), np.int64))]

    def _settle(self) -> None:
        """Move tokens on, a batch at a time, until every tier is within its room.

        Of several tiers past their room the oldest goes first: what comes from a newer one has to lie behind its tokens.
        """
        while past := [index for index, tier in enumerate(self._tiers) if len(tier) > tier.room]:
            tier, later = self._tiers[past[-1]], self._tiers[past[-1] + 1 :]
            count = min(len(tier) - tier.room, self.config.migration_batch)
            target = next(each for each in later if each.room)
            for keys, values in tier.read(0, count):
                target.write(keys, values)
            tier.let_go(count)
            self._moved_at = self._next

    def _evict(self, count: int) -> None:
        """Let go of the oldest `count` tokens, or of all there are."""
        for tier in reversed(self._tiers):
            taken = min(count, len(tier))
            tier.let_go(taken)
            count -= taken

    def _adopt(self, config: TieredConfig) -> None:
        """Let the tiers take new tokens as the policy says.

        Memory comes first, and whether what is held can move on: where it runs out, or raises NonFinite, nothing has changed.
        """
        policy = (
            (config.tail_length, FORMATS[config.tail_dtype]),
            (config.warm_length, FORMATS[config.warm_format]),
            (config.max_tokens, FORMATS[config.store_format]),
        )
        opened: list[Run | None] = []
        for tier, (room, format) in zip(self._tiers, policy, strict=True):
            capacity = min(room + config.migration_batch, config.max_tokens)
            run = None
            if room and not (tier.runs and tier.runs[-1].takes(capacity, format)):
                store = TokenStore(self._backend, format, capacity, config.num_kv_heads, config.head_dim)
                run = Run(capacity, 0, store)
            opened.append(run)
        newest = [
            run or (tier.runs[-1] if room else None) for tier, (room, _), run in zip(self._tiers, policy, opened, strict=True)
        ]
        for index, tier in enumerate(self._tiers):
            way = [run.store for run in newest[index + 1 :] if run]
            for keys, values in tier.read(0, len(tier) if way else 0):
                check_way(keys, values, way)
        self.config = config
        for tier, (room, _), run in zip(self._tiers, policy, opened, strict=True):
            tier.room = room
            tier.runs += [] if run is None else [run]

    def _check_storable(self, name: str, tokens: Array) -> None:
        """Whatever the policy becomes, every tier has to be able to take them: look at them as the tail will hold them."""
        xp, tail, held = self._backend.xp, FORMATS[self.config.tail_dtype], ""
        if tokens.shape[0] == 0:
            return
        largest = xp.reshape(xp.max(xp.abs(tokens)), (1,))
        if self.config.tail_length:  # rounding keeps the order of numbers: the largest of all is still the largest
            largest = self._backend.dequantize(self._backend.quantize(largest, tail), 1, tail)
            held = f" as a {tail.name} tail holds them"
        if not float(largest[0]) < MAGNITUDES_BELOW:  # nor is NaN
            raise NonFinite(f"{name}: expected magnitudes below {MAGNITUDES_BELOW:.3g}{held}, got {float(largest[0]):.3g}")
