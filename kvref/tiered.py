"""The tiered cache: the newest tokens at full precision, older tokens quantized, the oldest evicted.

    append -> [ tail ] -> [ warm tier, if there is one ] -> [ store ] -> evicted

`append` adds tokens to the tail. Tokens for which a tier has no more room migrate to the next tier, the oldest first and at most
`migration_batch` at a time. The next tier quantizes what they read as in the tier before. If there are more than `max_tokens`
tokens, the oldest are evicted. Positions are absolute: eviction does not change them.

All public methods hold a lock, so that threads can share a cache (TIER-12).
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
from kvref.errors import ConfigError, NonFinite, NotTruncatable, PositionOutOfRange, in_range, whole_fields
from kvref.formats import FORMATS, PLAIN_DTYPES, SCALED_FORMATS, get_format
from kvref.serialization import Serializable
from kvref.snapshot import Contents, SavedState, TokenSpan, key_and_value_spans, shape_of
from kvref.tier_queue import Tier, TierSegment, check_migration, segments_from_json
from kvref.token_store import TokenStore
from kvref.validation import accept_pair

MAGNITUDES_BELOW = 2.0**126  # of accepted numbers: then no rounding in a tier makes a value or a range overflow (TIER-13)
POLICY = ("tail_length", "tail_dtype", "warm_length", "warm_format", "store_format")


@dataclass(frozen=True)
class TieredConfig:
    """Sizes and policy of a TieredCache. Raises ConfigError (LAW-12).

    - `max_tokens`: tokens in all tiers together, at most.
    - `tail_length`, `warm_length`: tokens for which the tail and the warm tier have room; 0 means that there is no such tier. The
      store has room for the others. With tail_length = max_tokens every token stays in the tail, and no token is quantized. With
      tail_length = 0 tokens are quantized when they are appended (TIER-15).
    - `tail_dtype`: float32, float16 or bfloat16.
    - `warm_format`, `store_format`: any format with a scale; if it has groups, `head_dim` must be a multiple of the group
      (TIER-17). Static formats have the scale 1.0.
    - `migration_batch`: tokens that migrate at a time. It does not change any result (TIER-04).

    `update_policy` can change the five fields in POLICY: the lengths, the dtype and the formats of the tiers.
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
        get_format(self.tail_dtype, among=PLAIN_DTYPES, argument="tail_dtype")
        for argument in ("warm_format", "store_format"):
            format = get_format(getattr(self, argument), among=SCALED_FORMATS, argument=argument)
            format.code_width(self.head_dim)  # raises ConfigError unless head_dim is a multiple of the group


@dataclass(frozen=True)
class TieredStats:
    """Tokens, and bytes of their codes, scales and zeros, per tier (TIER-08).

    `compression_ratio` is the bytes of the same tokens in float32 divided by the sum of the three; 1.0 without tokens.
    """

    total_tokens: int
    tail_tokens: int
    warm_tokens: int
    store_tokens: int
    tail_bytes: int
    warm_bytes: int
    store_bytes: int
    compression_ratio: float


class TieredCache(Serializable):
    """A cache of one sequence and layer, whose tokens migrate from a tail to quantized tiers (chapter TIER).

    Threads can share a cache: each call is atomic (TIER-12).
    """

    _saved_attributes = ("_tiers", "_next", "_moved_at")

    def __init__(self, config: TieredConfig, backend: Backend = reference) -> None:
        """Allocate memory for the tiers of the policy on the device of `backend`."""
        self._backend = backend
        self._lock = RLock()
        self._tiers = [Tier("tail"), Tier("warm"), Tier("store")]
        self._next = 0  # the position of the next token appended
        self._moved_at = 0  # the value of _next when tokens last migrated or were evicted
        self._set_policy(config)

    def append(self, keys: Array, values: Array) -> None:
        """Append n tokens. keys, values: [n, num_kv_heads, head_dim].

        Raises ShapeMismatch (TIER-09), DtypeMismatch, or NonFinite if some tier of the policy cannot store a number, now or when
        the token migrates to it (TIER-13, TIER-18).
        """
        shape = ("n", self.config.num_kv_heads, self.config.head_dim)
        keys, values = accept_pair(keys, values, shape, self._backend)
        with self._lock:
            self._check_storable("keys", keys)
            self._check_storable("values", values)
            check_migration(keys, values, [tier.segments[-1].store for tier in self._tiers if tier.room])
            count, room, batch = keys.shape[0], self.config.max_tokens, self.config.migration_batch
            if (past := self.total_tokens + count - room) > 0:
                self._evict(past)
                self._moved_at = self._next + count
            forgotten = max(0, count - room)  # the first tokens of an append longer than the cache (TIER-05)
            self._next += forgotten
            newest = next(tier for tier in self._tiers if tier.room)
            for start in range(forgotten, count, batch):
                piece = slice(start, min(start + batch, count))
                newest.write(keys[piece, ...], values[piece, ...])
                self._next += piece.stop - piece.start
                self._migrate()

    def read(self) -> tuple[Array, Array]:
        """Return the keys and values of all tokens, oldest first: float32 [total_tokens, num_kv_heads, head_dim] (TIER-03)."""
        with self._lock:
            return self._read(0, self.total_tokens)

    def _read(self, start: int, stop: int) -> tuple[Array, Array]:
        """The tokens with the indices [start, stop), where the oldest token has the index 0."""
        empty = self._backend.zeros((0, self.config.num_kv_heads, self.config.head_dim), "float32")
        parts = [(empty, empty)]
        for tier in reversed(self._tiers):
            parts += tier.read(start, stop)
            start, stop = start - len(tier), stop - len(tier)
        keys, values = (self._backend.xp.concat(list(each), axis=0) for each in zip(*parts, strict=True))
        return keys, values

    def read_into(self, pool: BufferPool) -> tuple[Buffer, Buffer]:
        """Copy what `read` returns to two buffers of a pool, one for keys and one for values, and return them.

        The numbers are in C order. The caller releases the buffers. Raises BufferTooLarge.
        """
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
        """Return attention over what `read` returns: float32 [num_queries, num_query_heads, head_dim] (ATTN-10, TIER-11).

        query: [num_queries, num_query_heads, head_dim]. scale: 1 / sqrt(head_dim) by default. causal: the queries are those of
        the last tokens, and each sees the tokens up to its own. Raises ShapeMismatch or DtypeMismatch.
        """
        row = self.config.num_kv_heads, self.config.head_dim
        with self._lock:
            return attention_as_read(query, self._read, self.total_tokens, row, scale=scale, causal=causal, backend=self._backend)

    def tier_of(self, position: int) -> str:
        """Return the tier of the token at a position: "tail", "warm" or "store" (TIER-07).

        Raises PositionOutOfRange if the token was evicted or is not yet appended.
        """
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
        """The number of tokens in all tiers, without evicted ones (TIER-06)."""
        with self._lock:
            return sum(len(tier) for tier in self._tiers)

    def stats(self) -> TieredStats:
        """Return the numbers of tokens and bytes per tier (TIER-08)."""
        with self._lock:
            tokens, sizes = [len(tier) for tier in self._tiers], [tier.bytes for tier in self._tiers]
            float32 = 8 * self.config.num_kv_heads * self.config.head_dim * sum(tokens)
            ratio = float32 / sum(sizes) if float32 else 1.0
            return TieredStats(sum(tokens), tokens[0], tokens[1], tokens[2], sizes[0], sizes[1], sizes[2], ratio)

    def update_policy(self, **changes: int | str) -> None:
        """Change fields of the policy (POLICY), all at once (TIER-10).

        Tokens for which a shorter tier has no more room migrate before the call returns. A new format is used for tokens that
        enter the tier afterwards. Memory that is not needed any more is freed (TIER-16).

        Raises ConfigError for an unknown field or an invalid policy, NonFinite if a tier of the new policy could not store a
        token of the cache (TIER-18). If it raises, nothing has changed.
        """
        for name in changes:
            if name not in POLICY:
                raise ConfigError(f"update_policy: expected {', '.join(POLICY)}, got {name!r}")
        with self._lock:
            self._set_policy(replace(self.config, **changes))  # type: ignore[arg-type]  # checked by TieredConfig
            self._migrate()
            for tier in self._tiers:
                tier.drop_empty()

    def truncate(self, length: int) -> None:
        """Remove the tokens at position `length` and later, as if they had never been appended (EDIT-01, EDIT-03).

        Raises PositionOutOfRange if `length` is negative or greater than the number of appended tokens, evicted ones included.
        Raises NotTruncatable if tokens migrated or were evicted when the tokens to remove were appended, because this cannot be
        undone (EDIT-06).
        """
        with self._lock:
            length = in_range(length, self._next + 1, PositionOutOfRange, "length")
            if length < self._moved_at:
                raise NotTruncatable(f"cannot truncate to {length}: tokens last moved to another tier at length {self._moved_at}")
            count, self._next = self._next - length, length
            for tier in self._tiers:
                count -= tier.remove_newest(min(count, len(tier)))

    def clear(self) -> None:
        """Remove every token. The next token gets position 0."""
        with self._lock:
            self._next = self._moved_at = 0
            for tier in self._tiers:
                tier.remove_oldest(len(tier))

    def contents(self) -> Contents:
        """Describe what `save` writes: every token, with its tier and its format."""
        with self._lock:
            tiers = {tier.name: [segment.to_json() for segment in tier.segments] for tier in self._tiers}
            state = {"next": self._next, "moved_at": self._moved_at, "tiers": tiers}
            return Contents("tiered", shape_of(self.config), state, self._token_spans())

    def receive(self, file: BinaryIO) -> None:
        """`load` from an open binary file. Used by `kvref.load`."""
        with self._lock:
            super().receive(file)

    def _new_cache(self) -> "TieredCache":
        return TieredCache(self.config, self._backend)

    def _allocate_for(self, saved: SavedState) -> Sequence[TokenSpan]:
        self._next = saved.number("next")
        self._moved_at = saved.number("moved_at", most=self._next)
        tiers, config = saved.state.get("tiers"), self.config
        for tier in self._tiers:
            described = tiers.get(tier.name) if isinstance(tiers, dict) else None
            segments = segments_from_json(described, config.max_tokens, config.num_kv_heads, config.head_dim, self._backend)
            tier.segments = deque(segments)
        return self._token_spans()

    def _token_spans(self) -> list[TokenSpan]:
        """The keys and values of each segment of each tier."""
        segments = [(f"{tier.name}.{at}", segment) for tier in self._tiers for at, segment in enumerate(tier.segments)]
        found = list[TokenSpan]()
        for name, segment in segments:
            slots = np.array(segment.slots(segment.start, segment.stop), np.int64)
            found += key_and_value_spans(name, segment.store, slots)
        return found

    def _migrate(self) -> None:
        """Migrate tokens, `migration_batch` at a time, until no tier has more tokens than room.

        If several tiers do, the tier with the oldest tokens is first, because tokens must enter the next tier in order.
        """
        while past := [index for index, tier in enumerate(self._tiers) if len(tier) > tier.room]:
            tier, later = self._tiers[past[-1]], self._tiers[past[-1] + 1 :]
            count = min(len(tier) - tier.room, self.config.migration_batch)
            target = next(each for each in later if each.room)
            for keys, values in tier.read(0, count):
                target.write(keys, values)
            tier.remove_oldest(count)
            self._moved_at = self._next

    def _evict(self, count: int) -> None:
        """Evict the oldest `count` tokens, or all if there are fewer."""
        for tier in reversed(self._tiers):
            taken = min(count, len(tier))
            tier.remove_oldest(taken)
            count -= taken

    def _set_policy(self, config: TieredConfig) -> None:
        """Set the policy of the tiers for new tokens.

        New memory is allocated, and the migration of all present tokens is tried, before anything changes: if the memory does not
        suffice, or a token raises NonFinite, the old policy remains.
        """
        policy = (
            (config.tail_length, FORMATS[config.tail_dtype]),
            (config.warm_length, FORMATS[config.warm_format]),
            (config.max_tokens, FORMATS[config.store_format]),
        )
        added: list[TierSegment | None] = []
        for tier, (room, format) in zip(self._tiers, policy, strict=True):
            capacity = min(room + config.migration_batch, config.max_tokens)
            segment = None
            if room and not (tier.segments and tier.segments[-1].accepts(capacity, format)):
                store = TokenStore(self._backend, format, capacity, config.num_kv_heads, config.head_dim)
                segment = TierSegment(capacity, 0, store)
            added.append(segment)
        newest = [
            segment or (tier.segments[-1] if room else None)
            for tier, (room, _), segment in zip(self._tiers, policy, added, strict=True)
        ]
        for index, tier in enumerate(self._tiers):
            later = [segment.store for segment in newest[index + 1 :] if segment]
            for keys, values in tier.read(0, len(tier) if later else 0):
                check_migration(keys, values, later)
        self.config = config
        for tier, (room, _), segment in zip(self._tiers, policy, added, strict=True):
            tier.room = room
            tier.segments += [] if segment is None else [segment]

    def _check_storable(self, name: str, tokens: Array) -> None:
        """Raise NonFinite for magnitudes of MAGNITUDES_BELOW or more, after rounding to the dtype of the tail (TIER-13)."""
        xp, tail, held = self._backend.xp, FORMATS[self.config.tail_dtype], ""
        if tokens.shape[0] == 0:
            return
        largest = xp.reshape(xp.max(xp.abs(tokens)), (1,))
        if self.config.tail_length:  # rounding is monotonic: the largest number stays the largest
            largest = self._backend.dequantize(self._backend.quantize(largest, tail), 1, tail)
            held = f" in the {tail.name} tail"
        if not float(largest[0]) < MAGNITUDES_BELOW:  # true for NaN as well
            raise NonFinite(f"{name}: expected magnitudes below {MAGNITUDES_BELOW:.3g}{held}, got {float(largest[0]):.3g}")
