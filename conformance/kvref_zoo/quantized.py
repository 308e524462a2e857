"""Wrong quantized caches."""

from typing import Any

import numpy as np

import kvref
from kvref_zoo.mutant import mutant


@mutant("MOVE-01", also="MOVE-02 MOVE-03 MOVE-04 MOVE-07", seen_in="ggml-org/llama.cpp#26676")
class MovingLoadChangesNothing(kvref.QuantizedCache):
    """`load` reads the file and reports success, but the cache does not get the contents."""

    def load(self, data: Any) -> None:
        kvref.QuantizedCache(self.config).load(data)


@mutant("MOVE-01", also="MOVE-02 MOVE-04", seen_in="kekzl/imp#1189")
class MovingScalesAreNotLoaded(kvref.QuantizedCache):
    """`load` restores the codes and not the scales, which stay those of a cache that was never written."""

    def load(self, data: Any) -> None:
        super().load(data)
        slots = np.arange(self.config.num_layers * self.config.capacity)
        for part in (self._store.keys, self._store.values):
            for name in part.fields[1:]:
                part.put_field(name, slots, np.zeros_like(part.field(name, slots)))


@mutant(
    "QUANT-05",
    also="EDIT-03 LAW-01 LAW-02 LAW-04 LAW-05 LAW-06 LAW-08 LAW-15 QUANT-01 QUANT-02 QUANT-03 QUANT-06 QUANT-08 QUANT-10",
)
class QuantizedAgainAtEachAppend(kvref.QuantizedCache):
    """Each append dequantizes all tokens and quantizes them again: every token loses precision at every step.

    QuantizedLayer in transformers 5.23 does so whenever its residual is full.
    """

    def _append(self, layers: Any, keys: Any, values: Any) -> None:
        before = [layer * self.config.capacity + p for layer in set(layers) for p in range(self._lengths[layer])]
        super()._append(layers, keys, values)
        if before:
            old_keys, old_values = self._store.read(before)
            self._store.write(before, old_keys * 0.999, old_values * 0.999)


@mutant("QUANT-08", also="LAW-05")
class QuantizedClearKeepsALayer(kvref.QuantizedCache):
    """`clear` empties the first layer only. The other layers keep their tokens."""

    def clear(self) -> None:
        self._lengths[0] = 0


@mutant(
    "LAW-04",
    also="ATTN-10 LAW-01 LAW-02 LAW-05 LAW-08 LAW-15 MOVE-01 QUANT-01 QUANT-02 QUANT-03 QUANT-04 QUANT-05 QUANT-06 QUANT-08 "
    "QUANT-10",
    seen_in="vllm-project/vllm#42580",
)
class QuantizedDropsItsScale(kvref.QuantizedCache):
    """Reads return the codes without multiplying them by their scale."""

    def read_tokens(self, layer: int, positions: Any) -> Any:
        keys, values = super().read_tokens(layer, positions)
        slots = [layer * self.config.capacity + position for position in positions]
        scale = np.asarray(self._store.keys._stored.scale)[slots]
        return (keys / scale[..., None]).astype("float32"), values


@mutant("LAW-14")
class QuantizedNanIsZero(kvref.QuantizedCache):
    """A NaN is stored as 0, and reads back as a number that was never computed."""

    def _append(self, layers: Any, keys: Any, values: Any) -> None:
        super()._append(layers, np.nan_to_num(keys, posinf=0, neginf=0), np.nan_to_num(values, posinf=0, neginf=0))


@mutant(
    "LAW-04",
    also="LAW-01 LAW-02 LAW-05 LAW-08 LAW-14 LAW-15 MOVE-01 QUANT-01 QUANT-02 QUANT-03 QUANT-05 QUANT-06 QUANT-08 QUANT-10",
)
class QuantizedScaleFrozen(kvref.QuantizedCache):
    """The scale of the first token is used for all later tokens: larger values are clipped.

    Fp8QuantizedLayer in transformers 5.23 uses the scale of the first update.
    """

    _most = np.inf

    def _append(self, layers: Any, keys: Any, values: Any) -> None:
        for layer in layers:
            if self._lengths[layer] == 0:
                self._most = np.maximum(np.abs(keys[:1]).max(), 1e-6)
        super()._append(layers, np.clip(keys, -self._most, self._most), values)


@mutant(
    "LAW-04",
    also="LAW-01 LAW-02 LAW-05 LAW-08 LAW-15 QUANT-01 QUANT-02 QUANT-03 QUANT-05 QUANT-06 QUANT-08 QUANT-10",
    seen_in="sgl-project/sglang#20705",
)
class QuantizedScaleOfOne(kvref.QuantizedCache):
    """The scale of the values is ignored, and 1.0 is used in its place."""

    def _append(self, layers: Any, keys: Any, values: Any) -> None:
        super()._append(layers, keys, values)
        np.asarray(self._store.values._stored.scale)[...] = 1.0


@mutant("LAW-01", also="QUANT-01")
class QuantizedStepHalfAppended(kvref.QuantizedCache):
    """A step that does not fit into the last layer remains in the layers before it."""

    def _append(self, layers: Any, keys: Any, values: Any) -> None:
        for token, layer in enumerate(layers):
            super()._append([layer], keys[token : token + 1], values[token : token + 1])


@mutant("EDIT-03", also="LAW-04 MOVE-01 QUANT-01 QUANT-02 QUANT-10", seen_in="rajveer43/VeloxQuant-MLX#369")
class QuantizedTruncateKeepsTheQuantizedCount(kvref.QuantizedCache):
    """The number of quantized tokens is a separate count, which `truncate` does not change.

    Tokens that are appended below this count are read with the scales of the removed tokens.
    """

    def __init__(self, config: kvref.QuantizedConfig) -> None:
        super().__init__(config)
        self._frontier = [0] * config.num_layers

    def truncate(self, length: int) -> None:
        frontier = [max(pair) for pair in zip(self._frontier, self._lengths, strict=True)]
        super().truncate(length)
        self._frontier = frontier

    def clear(self) -> None:
        super().clear()
        self._frontier = [0] * self.config.num_layers

    def _append(self, layers: Any, keys: Any, values: Any) -> None:
        slots, lengths = list[int](), list(self._lengths)
        for layer in layers:
            if lengths[layer] < self._frontier[layer]:
                slots.append(layer * self.config.capacity + lengths[layer])
            lengths[layer] += 1
        stores = (self._store.keys, self._store.values)
        scales = [np.array(store._stored.scale)[slots] for store in stores]
        super()._append(layers, keys, values)
        for store, scale in zip(stores, scales, strict=True):
            np.asarray(store._stored.scale)[slots] = scale


@mutant("EDIT-01", also="EDIT-03", seen_in="ml-explore/mlx-swift-lm#173")
class QuantizedTruncatesOneLayer(kvref.QuantizedCache):
    """`truncate` shortens the first layer only: the other layers keep the removed tokens and are longer from then on."""

    def truncate(self, length: int) -> None:
        others = self._lengths[1:]
        super().truncate(length)
        self._lengths[1:] = others
