"""Wrong per-channel caches."""

from typing import Any

import numpy as np

import kvref
from kvref.errors import PositionOutOfRange, in_range
from kvref_zoo.mutant import mutant


@mutant("KIVI-02", also="ATTN-10 EDIT-02 EDIT-03 KIVI-01 KIVI-03 KIVI-04 KIVI-06 KIVI-07 KIVI-08")
class ChannelsFlushClearsUnquantizedValues(kvref.ChannelCache):
    """A flush of the keys also clears the values of the same tokens, which are still stored in full.

    They read as zeros until they are quantized.
    """

    def append(self, keys: Any, values: Any) -> None:
        flushed = self.quantized_keys
        super().append(keys, values)
        if self.quantized_keys > flushed:
            slots = np.arange(self.quantized_values, self.quantized_keys) % self._ring
            nothing = np.zeros((len(slots), self.config.num_kv_heads, self.config.head_dim), np.float32)
            self._full.write(slots, nothing, nothing)


@mutant("KIVI-03", also="KIVI-01 KIVI-02 KIVI-04 KIVI-06 KIVI-08")
class ChannelsQuantizedAgainAtEachFlush(kvref.ChannelCache):
    """Each flush quantizes all quantized keys again, with one scale per channel: old tokens lose precision at every flush.

    The QuantizedLayer of transformers 5.23 also quantizes its history again whenever its residual is full, in groups of a fixed
    size.
    """

    def append(self, keys: Any, values: Any) -> None:
        flushed = self.quantized_keys
        before = self._read(0, flushed)[0]
        super().append(keys, values)
        count = self.quantized_keys
        if 0 < flushed < count:
            history = np.concatenate([before, self._read(flushed, count)[0]])
            least, largest = history.min(axis=0), history.max(axis=0)
            scale = np.maximum((largest - least) / np.float32(self.config.groups.top), np.float32(2.0**-23))
            again = np.rint((history - least) / scale) * scale + least
            self._keys.put(range(count // self.config.groups.group), self._keys.quantized(self._by_channel(again)))


@mutant("KIVI-01", also="ATTN-10 EDIT-02 EDIT-03 KIVI-02 KIVI-03 KIVI-04 KIVI-06 KIVI-07 KIVI-08")
class ChannelsScaleKeysByToken(kvref.ChannelCache):
    """Keys have their scales along head_dim, as values do.

    Channels that are large at every token make the other channels inaccurate.
    """

    def _by_channel(self, tokens: Any) -> Any:
        return tokens.reshape(-1, self.config.num_kv_heads * self.config.head_dim, self.config.groups.group)

    def _by_token(self, groups: Any) -> Any:
        return groups.reshape(-1, self.config.num_kv_heads, self.config.head_dim)


@mutant("KIVI-08", seen_in="rajveer43/VeloxQuant-MLX#369")
class ChannelsTruncatesTheLengthOnly(kvref.ChannelCache):
    """`truncate` changes only the length.

    Tokens that count as stored in full again are read from ring slots that contain other tokens.
    """

    def truncate(self, length: int) -> None:
        self.length = in_range(length, self.length + 1, PositionOutOfRange, "length")
