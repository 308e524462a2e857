"""The cache that quantizes keys by channel, as KIVI does (Liu et al. 2024): 2 to 8 bits, and the newest tokens in full.

A channel is one element of one head. Keys have channels that are large at every token, so that a scale a token is spoiled by
them: here `group` tokens of one channel share a scale, and no other channel has a part in it. Values have none, and share one
along head_dim. Which tokens are quantized follows from how many there are, and from nothing else:

    keys     the first n // residual * residual of n tokens: when `residual` tokens are held in full, all of them are quantized
    values   all but the newest `residual`: one token at a time, as it gets that old

Tokens in full lie in a ring, position p at slot p % ring, until others come to lie there. What is quantized is made of what the
ring holds, once (KIVI-03); what is taken back is still in the ring, or cannot be (KIVI-08).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvref.array import Array
from kvref.attention import attention_as_read
from kvref.backend import Backend, reference
from kvref.errors import (
    CapacityExceeded,
    ConfigError,
    NonFinite,
    NotTruncatable,
    PositionOutOfRange,
    in_range,
    whole_fields,
)
from kvref.formats import PLAIN_DTYPES, get_format
from kvref.formats.grouped import GROUPS, Groups
from kvref.inputs import accept_pair
from kvref.slots import SlotStore, TokenStore

AFFINE = {each.name: each for each in GROUPS if each.affine}
# What any group can hold, whatever it is together with: its zero, its range and its largest value are finite (KIVI-06).
MAGNITUDES_BELOW = {"float32": 2.0**126, "bfloat16": 2.0**126, "float16": 65520.0}


@dataclass(frozen=True)
class ChannelConfig:
    """residual: the tokens that are held in full before keys are quantized, a multiple of the format's group. format: an affine
    one of groups, uint{8,4,2}_g{32,64,128}_{float32,float16,bfloat16}, whose group goes into head_dim too. dtype: how tokens are
    held in full. rollback: tokens that `truncate` can always take back.
    """

    num_kv_heads: int
    head_dim: int
    max_tokens: int
    residual: int = 128
    format: str = "uint2_g32_float16"
    dtype: str = "float32"
    rollback: int = 0

    def __post_init__(self) -> None:
        whole_fields(self, "num_kv_heads", "head_dim", "max_tokens", "residual")
        whole_fields(self, "rollback", minimum=0)
        get_format(self.dtype, among=PLAIN_DTYPES)
        get_format(self.format, among=AFFINE).code_width(self.head_dim)
        if self.residual % self.groups.group:
            raise ConfigError(f"residual: expected a multiple of {self.groups.group}, got {self.residual}")

    @property
    def groups(self) -> Groups:
        return AFFINE[self.format]

    def quantized_keys(self, tokens: int) -> int:
        """Of so many tokens, those whose keys are quantized (KIVI-02)."""
        return tokens // self.residual * self.residual

    def quantized_values(self, tokens: int) -> int:
        return max(0, tokens - self.residual)


class ChannelCache:
    def __init__(self, config: ChannelConfig, backend: Backend = reference) -> None:
        self.config = config
        self.length = 0
        self._first = 0  # the oldest token that the ring holds
        self._backend = backend
        self._ring = min(config.residual + config.rollback, config.max_tokens)
        format, heads, dim = config.groups, config.num_kv_heads, config.head_dim
        groups = config.quantized_keys(config.max_tokens) // format.group
        self._full = TokenStore(backend, get_format(config.dtype), self._ring, heads, dim)
        self._keys = SlotStore(backend, format, groups, heads * dim, format.group)  # a slot is a group: a row for each channel
        self._values = SlotStore(backend, format, config.quantized_values(config.max_tokens), heads, dim)

    def append(self, keys: Array, values: Array) -> None:
        """Append n tokens, keys and values [n, num_kv_heads, head_dim]: all or none (KIVI-07).

        Raises ShapeMismatch, DtypeMismatch, CapacityExceeded, or NonFinite for a number that a group could not hold (KIVI-06).
        """
        config, start = self.config, self.length
        keys, values = accept_pair(keys, values, ("n", config.num_kv_heads, config.head_dim), self._backend)
        stop = start + keys.shape[0]
        if stop > config.max_tokens:
            raise CapacityExceeded(f"cache full: {stop} tokens needed, max_tokens is {config.max_tokens}")
        full = self._full.quantized(keys, values)
        new = self._full.dequantized(full)
        for name, part in zip(("keys", "values"), new, strict=True):
            self._check_storable(name, part)
        old_keys = config.quantized_keys(start), config.quantized_keys(stop)
        old_values = config.quantized_values(start), config.quantized_values(stop)
        by_channel = self._keys.quantized(self._by_channel(self._originals(0, *old_keys, new)))
        by_token = self._values.quantized(self._originals(1, *old_values, new))
        group = config.groups.group
        self._keys.put(range(old_keys[0] // group, old_keys[1] // group), by_channel)
        self._values.put(range(*old_values), by_token)
        positions = np.arange(start, stop)
        slots = np.where(positions >= stop - self._ring, positions % self._ring, -1)  # of more than a ring the last (KERN-02)
        self._full.put(slots, full)
        self.length, self._first = stop, max(self._first, stop - self._ring)

    def read(self, positions: Sequence[int]) -> tuple[Array, Array]:
        """Keys and values at `positions`, float32 [n, num_kv_heads, head_dim]. Raises PositionOutOfRange."""
        wanted = np.array([in_range(each, self.length, PositionOutOfRange, "position") for each in positions], np.int64)
        keys, values = self._read(0, self.length)
        return self._backend.gather(keys, wanted), self._backend.gather(values, wanted)

    def attend(self, query: Array, scale: float | None = None, causal: bool = False) -> Array:
        """Attention of query [num_queries, num_query_heads, head_dim] over what the cache reads as (ATTN-10)."""
        row = self.config.num_kv_heads, self.config.head_dim
        return attention_as_read(query, self._read, self.length, row, scale=scale, causal=causal, backend=self._backend)

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens, as if the others had never come (EDIT-03).

        Raises PositionOutOfRange for more than there are, and NotTruncatable where a token would be held in full that is not.
        """
        length = in_range(length, self.length + 1, PositionOutOfRange, "length")
        full = self.config.quantized_values(length)  # from here on, of so many tokens; keys from there or later
        if length and full < self._first:
            least = self._first + self.config.residual
            raise NotTruncatable(f"cannot truncate to {length}: keys before position {least} are quantized in groups (0 works)")
        self.length, self._first = length, min(self._first, length)

    def clear(self) -> None:
        """Forget every token; the memory stays."""
        self.truncate(0)

    @property
    def quantized_keys(self) -> int:
        """Tokens whose keys are quantized: the first so many."""
        return self.config.quantized_keys(self.length)

    @property
    def quantized_values(self) -> int:
        """Tokens whose values are quantized: the first so many."""
        return self.config.quantized_values(self.length)

    @property
    def memory_bytes(self) -> int:
        """Codes, scales and zeros of what is quantized, and the tokens held in full (KIVI-05)."""
        keys, values = self.quantized_keys, self.quantized_values
        stored = keys // self.config.groups.group * self._keys.token_bytes + values * self._values.token_bytes
        return stored + (2 * self.length - keys - values) * self._full.keys.token_bytes

    def _check_storable(self, name: str, held: Array) -> None:
        """Whatever comes to lie in one group, the group has to be storable when it is full: look at tokens as they are held."""
        xp, below, dtype = self._backend.xp, MAGNITUDES_BELOW[self.config.groups.scale.name], self.config.dtype
        if held.shape[0] and not float(largest := xp.max(xp.abs(held))) < below:  # nor is NaN
            raise NonFinite(f"{name}: expected magnitudes below {below:.6g} as {dtype} holds them, got {float(largest):.6g}")

    def _originals(self, which: int, start: int, stop: int, new: tuple[Array, Array]) -> Array:
        """Keys, or values, of tokens before they are quantized: of the ring up to the length, and behind it new ones."""
        held = self._from_ring(which, start, min(stop, self.length))
        more = new[which][max(0, start - self.length) : max(0, stop - self.length), ...]
        return self._backend.xp.concat([held, more], axis=0)

    def _from_ring(self, which: int, start: int, stop: int) -> Array:
        return (self._full.keys, self._full.values)[which].read(np.arange(start, stop) % self._ring)

    def _read(self, start: int, stop: int) -> tuple[Array, Array]:
        """Tokens [start, stop), float32 [stop - start, num_kv_heads, head_dim]."""
        xp, group = self._backend.xp, self.config.groups.group
        keys, values = (min(max(start, each), stop) for each in (self.quantized_keys, self.quantized_values))
        first, last = start // group, -(-keys // group) if start < keys else start // group
        groups = self._by_token(self._keys.read(range(first, last)))  # whole ones, though not all of their tokens are wanted
        by_channel = groups[start - first * group :, ...][: keys - start, ...]
        by_token = self._values.read(range(start, values))
        return (
            xp.concat([by_channel, self._from_ring(0, keys, stop)], axis=0),
            xp.concat([by_token, self._from_ring(1, values, stop)], axis=0),
        )

    def _by_channel(self, tokens: Array) -> Array:
        """Tokens [n, num_kv_heads, head_dim] as groups of them, [n / group, num_kv_heads * head_dim, group] (KIVI-01)."""
        xp, group = self._backend.xp, self.config.groups.group
        rows = xp.reshape(tokens, (tokens.shape[0] // group, group, self.config.num_kv_heads * self.config.head_dim))
        return xp.permute_dims(rows, (0, 2, 1))

    def _by_token(self, groups: Array) -> Array:
        """The same the other way round."""
        xp, config = self._backend.xp, self.config
        tokens = groups.shape[0] * config.groups.group
        return xp.reshape(xp.permute_dims(groups, (0, 2, 1)), (tokens, config.num_kv_heads, config.head_dim))
