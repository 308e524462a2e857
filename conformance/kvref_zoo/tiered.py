"""Wrong tiered caches."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

import kvref
from kvref.errors import NonFinite, NotTruncatable
from kvref_zoo.mutant import mutant


@mutant("TIER-11", also="ATTN-10 TIER-09")
class TieredAttendsAsOneHead(kvref.TieredCache):
    """Attention treats all heads of a token as one long vector: every head gets the same weights."""

    def attend(self, query: Any, scale: Any = None, causal: bool = False) -> Any:
        keys, values = self.read()
        if query.shape[1:] != keys.shape[1:] or not len(keys):
            return super().attend(query, scale, causal)
        flat = [part.reshape(part.shape[0], 1, -1) for part in (query, keys, values)]
        return kvref.attention(*flat, scale=scale, causal=causal).reshape(query.shape)


@mutant("TIER-13", also="LAW-01 LAW-04 TIER-01")
class TieredChecksBeforeItRounds(kvref.TieredCache):
    """The range of a token is checked before it is rounded to the dtype of the tail.

    A token is accepted that cannot migrate later, and then every append fails.
    """

    def _check_storable(self, name: str, tokens: Any) -> None:
        flat = np.asarray(tokens, np.float64).reshape(len(tokens), self.config.num_kv_heads * self.config.head_dim)
        with np.errstate(over="ignore"):
            held = flat.astype(np.float16) if self.config.tail_dtype == "float16" and self.config.tail_length else flat
            ranges = (flat.max(axis=1) - flat.min(axis=1)).astype(np.float32)
        if not (np.isfinite(held).all() and np.isfinite(ranges).all()):
            raise NonFinite(f"{name}: expected finite values, and ranges within float32")


@mutant("LAW-05", also="LAW-04 LAW-08 LAW-21 TIER-01 TIER-09 TIER-17", seen_in="huggingface/transformers#45510")
class TieredClearsTheTailOnly(kvref.TieredCache):
    """`clear` empties the tail and not the store: the next prompt is read after the tokens of the last one."""

    def clear(self) -> None:
        self._tiers[0].remove_oldest(len(self._tiers[0]))


@mutant("TIER-09", also="LAW-01 LAW-10")
class TieredDropsTheRemainder(kvref.TieredCache):
    """A flat array that is not a whole number of tokens is cut to a whole number, and no error is raised."""

    def append(self, keys: Any, values: Any) -> None:
        width = self.config.num_kv_heads * self.config.head_dim
        if keys.ndim == 1 and values.ndim == 1:
            count = min(keys.size, values.size) // width
            keys, values = (part[: count * width].reshape(count, -1, self.config.head_dim) for part in (keys, values))
        super().append(keys, values)


@mutant(
    "TIER-05",
    also="EDIT-02 EDIT-03 EDIT-06 LAW-04 MOVE-01 TIER-03 TIER-07 TIER-08 TIER-09 TIER-10 TIER-14 TIER-15 TIER-17",
    seen_in="ml-explore/mlx-lm#1914",
)
class TieredEvictsOneACall(kvref.TieredCache):
    """Each call evicts at most one token, however many tokens it appends."""

    def _evict(self, count: int) -> None:
        super()._evict(min(count, 1))


@mutant("EDIT-06", also="MOVE-01", seen_in="ml-explore/mlx-lm#1109")
class TieredFailedTruncateIsIgnored(kvref.TieredCache):
    """A truncation that is not possible changes nothing and raises no error: a rejected draft stays in the cache."""

    def truncate(self, length: int) -> None:
        with suppress(NotTruncatable):
            super().truncate(length)


@mutant("TIER-16")
class TieredKeepsEveryFormat(kvref.TieredCache):
    """The store of every format that a tier ever had is kept, also if it contains no token any more."""

    def __init__(self, config: kvref.TieredConfig) -> None:
        self._kept: list[Any] = []
        super().__init__(config)

    def _set_policy(self, config: kvref.TieredConfig) -> None:
        before = {(tier.name, segment.store.format.name) for tier in self._tiers for segment in tier.segments}
        super()._set_policy(config)
        for tier in self._tiers:
            self._kept += [segment for segment in tier.segments if (tier.name, segment.store.format.name) not in before]


@mutant("TIER-16")
class TieredKeepsEveryStore(kvref.TieredCache):
    """Each change of the policy creates a store, and a store that contains no token is not freed."""

    def __init__(self, config: kvref.TieredConfig) -> None:
        super().__init__(config)
        for tier in self._tiers:
            tier.drop_empty = lambda: None  # type: ignore[method-assign]


@mutant(
    "LAW-06",
    also="ATTN-10 EDIT-03 LAW-01 LAW-04 LAW-16 LAW-17 MOVE-01 TIER-01 TIER-02 TIER-03 TIER-04 TIER-05 TIER-06 TIER-07 "
    "TIER-09 TIER-10 TIER-13 TIER-14 TIER-17 TIER-18",
    seen_in="rajveer43/VeloxQuant-MLX#86",
)
class TieredMigrationDependsOnTheCall(kvref.TieredCache):
    """Whether a token leaves the tail depends on the number of tokens in the call.

    Tokens that are appended one at a time never leave it.
    """

    def __init__(self, config: kvref.TieredConfig) -> None:
        super().__init__(replace(config, migration_batch=config.max_tokens))  # room in the tail for all tokens that stay there

    def append(self, keys: Any, values: Any) -> None:
        tail = self._tiers[0]
        if len(keys) == 1 and tail.room:
            tail.room = max(tail.room, len(tail) + 1)
        super().append(keys, values)


@mutant(
    "TIER-05",
    also="EDIT-01 EDIT-02 EDIT-03 EDIT-06 MOVE-01 MOVE-04 MOVE-07 TIER-03 TIER-06 TIER-09 TIER-10 TIER-12 TIER-14 TIER-15 "
    "TIER-17",
    seen_in="rajveer43/VeloxQuant-MLX#274",
)
class TieredNeverEvicts(kvref.TieredCache):
    """The cache never evicts a token, but reports at most max_tokens tokens."""

    _all: Any = ()

    def append(self, keys: Any, values: Any) -> None:
        super().append(keys, values)
        self._all = (*self._all, len(keys))

    def read(self) -> Any:
        keys, values = super().read()
        lost = sum(self._all) - len(keys)
        if lost > 0:
            pad = self._backend.zeros((lost, *keys.shape[1:]), "float32")
            return self._backend.xp.concat([pad, keys]), self._backend.xp.concat([pad, values])
        return keys, values

    def clear(self) -> None:
        super().clear()
        self._all = ()


@mutant("TIER-10", also="LAW-04 TIER-01 TIER-02 TIER-08 TIER-14")
class TieredPolicyFieldByField(kvref.TieredCache):
    """`update_policy` applies one field at a time.

    Fields before an invalid one stay changed, and changes that are valid only together are rejected.
    """

    def update_policy(self, **changes: Any) -> None:
        for name, value in changes.items():
            super().update_policy(**{name: value})


@mutant("TIER-10", also="EDIT-03 EDIT-06 LAW-12 MOVE-01 MOVE-02 TIER-01 TIER-02 TIER-08 TIER-09 TIER-14 TIER-15 TIER-17 TIER-18")
class TieredPolicyIsIgnored(kvref.TieredCache):
    """`update_policy` checks a new policy and does not apply it."""

    def update_policy(self, **changes: Any) -> None:
        replace(self.config, **changes)


@mutant(
    "TIER-01",
    also="EDIT-02 EDIT-06 LAW-01 LAW-02 LAW-04 LAW-06 LAW-08 LAW-15 MOVE-01 TIER-02 TIER-03 TIER-04 TIER-05 TIER-07 "
    "TIER-08 TIER-09 TIER-10 TIER-13 TIER-14 TIER-17 TIER-18",
    seen_in="huggingface/transformers#34189",
)
class TieredQuantizesTheNewest(kvref.TieredCache):
    """A long append quantizes all of its tokens, also the newest ones, which belong in the tail."""

    def append(self, keys: Any, values: Any) -> None:
        super().append(keys, values)
        tail = self._tiers[0]
        if len(keys) > self.config.tail_length:
            room, tail.room = tail.room, 0
            self._migrate()
            tail.room = room


@mutant("TIER-08", also="MOVE-01 TIER-09")
class TieredRatioOfTheTail(kvref.TieredCache):
    """The compression ratio is computed as the bytes of the tail over the bytes of the store."""

    def stats(self) -> Any:
        stats = super().stats()
        return replace(stats, compression_ratio=stats.tail_bytes / max(1, stats.store_bytes))


@mutant(
    "FMT-AFF-03",
    also="EDIT-01 EDIT-02 EDIT-03 EDIT-06 LAW-01 LAW-02 LAW-04 LAW-08 LAW-15 MOVE-01 MOVE-07 TIER-01 TIER-02 TIER-03 "
    "TIER-04 TIER-05 TIER-09 TIER-10 TIER-13 TIER-14 TIER-15 TIER-17 TIER-18",
)
class TieredSharesAScale(kvref.TieredCache):
    """Values are quantized with the range of their keys."""

    def __init__(self, config: kvref.TieredConfig) -> None:
        super().__init__(config)
        for tier in self._tiers[1:]:
            tier.write = clipping(tier.write)  # type: ignore[method-assign, assignment]


def clipping(write: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def clipped(keys: Any, values: Any) -> None:
        if len(keys):
            values = np.clip(values, keys.min(axis=(1, 2), keepdims=True), keys.max(axis=(1, 2), keepdims=True))
        write(keys, values)

    return clipped


class UncheckedConfig(kvref.TieredConfig):
    def __post_init__(self) -> None:
        """Checks nothing."""


@mutant("LAW-12", also="TIER-09 TIER-17", seen_in="Blaizzy/mlx-vlm#2061")
def tiered_takes_any_configuration(**config: Any) -> kvref.TieredCache:
    """The constructor accepts any configuration: the cache fails later, during generation."""
    try:
        return kvref.TieredCache(kvref.TieredConfig(**config))
    except kvref.errors.ConfigError:
        cache = kvref.TieredCache.__new__(kvref.TieredCache)
        cache.config = UncheckedConfig(**config)
        return cache


@mutant(
    "TIER-06",
    also="ATTN-10 EDIT-01 EDIT-02 EDIT-03 EDIT-06 LAW-04 LAW-05 LAW-21 MOVE-01 TIER-01 TIER-02 TIER-03 TIER-04"
    " TIER-05 TIER-07 TIER-08 TIER-09 TIER-10 TIER-12 TIER-13 TIER-14 TIER-17 TIER-18",
    seen_in="NVIDIA/TensorRT-LLM#12834",
)
class TieredTotalTokensDrifts(kvref.TieredCache):
    """The total number of tokens is wrong by one after tokens have migrated to the store."""

    @property
    def total_tokens(self) -> int:
        with self._lock:
            return sum(len(tier) for tier in self._tiers) + (1 if len(self._tiers[2]) > 1 else 0)

    def _evict(self, count: int) -> None:
        super()._evict(max(0, sum(len(tier) for tier in self._tiers) + count - self.total_tokens))


@mutant("EDIT-01", also="EDIT-03 EDIT-06 TIER-17")
class TieredTruncatesTheTailOnly(kvref.TieredCache):
    """`truncate` removes tokens from the tail only: removed tokens that had already been quantized stay in the cache."""

    def truncate(self, length: int) -> None:
        tail, gone = len(self._tiers[0]), self._next - length
        if isinstance(gone, int) and tail < gone <= self._next and length >= self._moved_at:
            length = self._next - tail
        super().truncate(length)


@mutant("EDIT-06", also="MOVE-01", seen_in="ml-explore/mlx-lm#1494")
class TieredTruncatesToMigratedTokens(kvref.TieredCache):
    """`truncate` succeeds although tokens that should be in the tail afterwards have migrated: they read as quantized."""

    def truncate(self, length: int) -> None:
        if self._next - self.total_tokens <= length < self._next:
            self._moved_at = min(self._moved_at, length)
        super().truncate(length)


@mutant(
    "TIER-03",
    also="EDIT-02 EDIT-03 EDIT-06 LAW-01 LAW-02 LAW-04 LAW-06 LAW-08 LAW-15 MOVE-01 MOVE-07 TIER-01 TIER-02 TIER-04 "
    "TIER-05 TIER-09 TIER-10 TIER-12 TIER-13 TIER-14 TIER-15 TIER-16 TIER-17 TIER-18",
    seen_in="huggingface/transformers#47708",
)
class TieredWrapsOneEarly(kvref.TieredCache):
    """The ring index wraps one slot early: the last slot is never written, and the first is written twice."""

    def _set_policy(self, config: kvref.TieredConfig) -> None:
        super()._set_policy(config)
        tail = self._tiers[0]
        for segment in tail.segments:
            segment.slots = lambda start, stop: [p % max(1, tail.room - 1) for p in range(start, stop)]  # type: ignore[method-assign]
