"""The KIVI cache: keys are quantized per channel (Liu et al. 2024), to 2, 4 or 8 bits, and the newest tokens are stored in full.

A channel is one element of one head. Keys have channels with large magnitudes at every token. With one scale per token, these
channels would determine it. Here `group` consecutive tokens of one channel share a scale, and channels do not affect each other.
Values have no such channels; there `group` consecutive elements of one token and head share a scale. Which tokens are quantized
depends on the number n of tokens only (KIVI-02):

    keys     the first n // residual * residual tokens: `residual` tokens are collected in full, and then quantized together
    values   all tokens but the newest `residual`: one token at a time

Tokens in full are in a ring, position p in slot p % ring, until another token overwrites them. Groups are quantized once, from
the numbers in the ring (KIVI-03). `truncate` works if all tokens that must be in full afterwards are still in the ring (KIVI-08).
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
from kvref.formats.group_scales import GROUPS, GroupFormat
from kvref.token_store import SlotStore, TokenStore
from kvref.validation import accept_pair

AFFINE = {each.name: each for each in GROUPS if each.affine}
# By dtype of scales: below these magnitudes, zero, range and largest value of any group are finite (KIVI-06).
MAGNITUDES_BELOW = {"float32": 2.0**126, "bfloat16": 2.0**126, "float16": 65520.0}


@dataclass(frozen=True)
class ChannelConfig:
    """Sizes and formats of a ChannelCache. Raises ConfigError (LAW-12).

    - `residual`: the number of tokens that are collected in full before their keys are quantized, a multiple of the group.
    - `format`: an affine format of groups, uint{8,4,2}_g{32,64,128}_{float32,float16,bfloat16}. `head_dim` must be a multiple of
      its group too (KIVI-09).
    - `dtype`: of tokens in full: float32, float16 or bfloat16.
    - `rollback`: the number of newest tokens that `truncate` can always remove (KIVI-08).
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
        get_format(self.dtype, among=PLAIN_DTYPES, argument="dtype")
        get_format(self.format, among=AFFINE).code_width(self.head_dim)
        if self.residual % self.groups.group:
            raise ConfigError(f"residual: expected a multiple of {self.groups.group}, got {self.residual}")

    @property
    def groups(self) -> GroupFormat:
        """The format of quantized keys and values."""
        return AFFINE[self.format]

    def quantized_keys(self, tokens: int) -> int:
        """Return how many keys are quantized if the cache has `tokens` tokens (KIVI-02)."""
        return tokens // self.residual * self.residual

    def quantized_values(self, tokens: int) -> int:
        """Return how many values are quantized if the cache has `tokens` tokens (KIVI-02)."""
        return max(0, tokens - self.residual)


class ChannelCache:
    """A cache of one sequence and layer whose keys are quantized per channel (chapter KIVI). `length` is the number of tokens."""

    def __init__(self, config: ChannelConfig, backend: Backend = reference) -> None:
        """Allocate memory for max_tokens tokens on the device of `backend`."""
        self.config = config
        self.length = 0
        self._first = 0  # the first position in the ring
        self._backend = backend
        self._ring = min(config.residual + config.rollback, config.max_tokens)
        format, heads, dim = config.groups, config.num_kv_heads, config.head_dim
        groups = config.quantized_keys(config.max_tokens) // format.group
        self._full = TokenStore(backend, get_format(config.dtype), self._ring, heads, dim)
        self._keys = SlotStore(backend, format, groups, heads * dim, format.group)  # a slot: a group, a row per channel
        self._values = SlotStore(backend, format, config.quantized_values(config.max_tokens), heads, dim)

    def append(self, keys: Array, values: Array) -> None:
        """Append n tokens: all or none (KIVI-07). keys, values: [n, num_kv_heads, head_dim].

        Raises ShapeMismatch, DtypeMismatch, CapacityExceeded if there would be more than max_tokens tokens, or NonFinite for a
        number that a group could not store later (KIVI-06).
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
        slots = np.where(positions >= stop - self._ring, positions % self._ring, -1)  # -1: skipped (KERN-02)
        self._full.put(slots, full)
        self.length, self._first = stop, max(self._first, stop - self._ring)

    def read(self, positions: Sequence[int]) -> tuple[Array, Array]:
        """Return the keys and values at `positions`, in their order: float32 [n, num_kv_heads, head_dim] each.

        Raises PositionOutOfRange unless each is in `[0, length)`.
        """
        wanted = np.array([in_range(each, self.length, PositionOutOfRange, "position") for each in positions], np.int64)
        needed = np.unique(wanted)
        gaps = np.flatnonzero(np.diff(needed) > self.config.groups.group) + 1  # a longer gap is not worth reading
        ranges = [(int(run[0]), int(run[-1]) + 1) for run in np.split(needed, gaps) if len(run)] or [(0, 0)]
        read = np.concatenate([np.arange(start, stop) for start, stop in ranges])
        at, xp = np.searchsorted(read, wanted), self._backend.xp
        keys, values = (xp.concat(list(parts), axis=0) for parts in zip(*(self._read(*each) for each in ranges), strict=True))
        return self._backend.gather(keys, at), self._backend.gather(values, at)

    def attend(self, query: Array, scale: float | None = None, causal: bool = False) -> Array:
        """Return attention over what the cache reads as: float32 [num_queries, num_query_heads, head_dim] (ATTN-10).

        query: [num_queries, num_query_heads, head_dim]. scale: 1 / sqrt(head_dim) by default. causal: the queries are those of
        the last tokens, and each sees the tokens up to its own. Raises ShapeMismatch or DtypeMismatch.
        """
        row = self.config.num_kv_heads, self.config.head_dim
        return attention_as_read(query, self._read, self.length, row, scale=scale, causal=causal, backend=self._backend)

    def truncate(self, length: int) -> None:
        """Remove all tokens but the first `length`, as if the others had never been appended (EDIT-03, KIVI-08).

        Raises PositionOutOfRange unless `length` is in `[0, self.length + 1)`, NotTruncatable if a token that must be in full
        afterwards is not in the ring any more.
        """
        length = in_range(length, self.length + 1, PositionOutOfRange, "length")
        full = self.config.quantized_values(length)  # values are in full from here on, keys from here or later
        if length and full < self._first:
            least = self._first + self.config.residual
            raise NotTruncatable(
                f"cannot truncate to {length}: keys before position {least} are quantized in groups (only 0 is possible)"
            )
        self.length, self._first = length, min(self._first, length)

    def clear(self) -> None:
        """Remove every token. The memory stays allocated."""
        self.truncate(0)

    @property
    def quantized_keys(self) -> int:
        """How many of the first tokens have quantized keys (KIVI-02)."""
        return self.config.quantized_keys(self.length)

    @property
    def quantized_values(self) -> int:
        """How many of the first tokens have quantized values (KIVI-02)."""
        return self.config.quantized_values(self.length)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the codes, scales and zeros of quantized keys and values, and of the others in `dtype` (KIVI-05)."""
        keys, values = self.quantized_keys, self.quantized_values
        stored = keys // self.config.groups.group * self._keys.token_bytes + values * self._values.token_bytes
        return stored + (2 * self.length - keys - values) * self._full.keys.token_bytes

    def _check_storable(self, name: str, held: Array) -> None:
        """Raise NonFinite for tokens, as stored in full, that a group could not store together with any others (KIVI-06)."""
        xp, below, dtype = self._backend.xp, MAGNITUDES_BELOW[self.config.groups.scale.name], self.config.dtype
        if held.shape[0] and not float(largest := xp.max(xp.abs(held))) < below:  # true for NaN as well
            raise NonFinite(f"{name}: expected magnitudes below {below:.6g} in {dtype}, got {float(largest):.6g}")

    def _originals(self, which: int, start: int, stop: int, new: tuple[Array, Array]) -> Array:
        """Keys (which = 0) or values (1) of the positions [start, stop) in full: from the ring, and from `new` for new tokens."""
        held = self._from_ring(which, start, min(stop, self.length))
        more = new[which][max(0, start - self.length) : max(0, stop - self.length), ...]
        return self._backend.xp.concat([held, more], axis=0)

    def _from_ring(self, which: int, start: int, stop: int) -> Array:
        """Keys (which = 0) or values (1) of the positions [start, stop), all in the ring."""
        return (self._full.keys, self._full.values)[which].read(np.arange(start, stop) % self._ring)

    def _read(self, start: int, stop: int) -> tuple[Array, Array]:
        """Keys and values of the positions [start, stop): float32 [stop - start, num_kv_heads, head_dim] each."""
        xp, group = self._backend.xp, self.config.groups.group
        keys, values = (min(max(start, each), stop) for each in (self.quantized_keys, self.quantized_values))
        first, last = start // group, -(-keys // group) if start < keys else start // group
        groups = self._by_token(self._keys.read(range(first, last)))  # whole groups, of which some tokens are not needed
        skipped = min(start - first * group, groups.shape[0])  # without quantized keys there is no group to skip tokens of
        by_channel = groups[skipped:, ...][: keys - start, ...]
        by_token = self._values.read(range(start, values))
        return (
            xp.concat([by_channel, self._from_ring(0, keys, stop)], axis=0),
            xp.concat([by_token, self._from_ring(1, values, stop)], axis=0),
        )

    def _by_channel(self, tokens: Array) -> Array:
        """Tokens [n, num_kv_heads, head_dim] by channel: [n / group, num_kv_heads * head_dim, group] (KIVI-01)."""
        xp, group = self._backend.xp, self.config.groups.group
        rows = xp.reshape(tokens, (tokens.shape[0] // group, group, self.config.num_kv_heads * self.config.head_dim))
        return xp.permute_dims(rows, (0, 2, 1))

    def _by_token(self, groups: Array) -> Array:
        """The inverse of `_by_channel`."""
        xp, config = self._backend.xp, self.config
        tokens = groups.shape[0] * config.groups.group
        return xp.reshape(xp.permute_dims(groups, (0, 2, 1)), (tokens, config.num_kv_heads, config.head_dim))
