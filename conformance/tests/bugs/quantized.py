"""Bugs in the quantized cache."""

import numpy as np

import kvref
from bugs.plant import bug, in_source
from kvref.quantized import QuantizedCache


@bug("QUANT-01", "LAW-01")
def a_step_is_half_appended(patch):
    def stepwise(self, keys, values):
        for layer in range(self.config.num_layers):
            self.append(layer, keys[layer : layer + 1], values[layer : layer + 1])

    patch.setattr(QuantizedCache, "append_step", stepwise)


@bug("QUANT-01", "LAW-01")
def a_prompt_is_appended_as_far_as_it_fits(patch):
    append = QuantizedCache._append

    def token_by_token(self, layers, keys, values):
        for token, layer in enumerate(layers):
            append(self, [layer], keys[token : token + 1], values[token : token + 1])

    patch.setattr(QuantizedCache, "_append", token_by_token)


@bug("QUANT-02")
def a_full_layer_overwrites_its_last_token(patch):
    in_source(
        patch,
        "kvref.quantized.QuantizedCache._append",
        "if lengths[layer] == capacity:",
        "lengths[layer] = min(lengths[layer], capacity - 1)\n        if False:",
    )


@bug("QUANT-03")
def heads_share_a_scale(patch):
    in_source(
        patch,
        "kvref.formats.row_scales.SymmetricRow.quantize",
        "xp.max(xp.abs(rows), axis=-1)",
        "xp.broadcast_to(xp.max(xp.abs(rows), axis=(-2, -1), keepdims=True)[..., 0], rows.shape[:-1])",
    )


@bug("QUANT-04")
def one_head_is_read_from_the_next(patch):
    in_source(patch, "kvref.quantized.QuantizedCache.read_head", "value[head, :]", "value[head - 1, :]")


@bug("QUANT-05")
def the_history_is_quantized_again_at_each_append(patch):
    append = QuantizedCache._append

    def requantizing(self, layers, keys, values):
        append(self, layers, keys, values)
        every = range(self._lengths[0])
        k, v = self._store.read(every)
        self._store.write(every, k * np.float32(1.01), v)

    patch.setattr(QuantizedCache, "_append", requantizing)


@bug("QUANT-07")
def scales_are_not_counted(patch):
    in_source(patch, "kvref.token_store.SlotStore.token_bytes", "in self._parts", "in self._parts[:1]")


@bug("QUANT-08", "LAW-05")
def clear_forgets_the_first_layer_only(patch):
    patch.setattr(QuantizedCache, "clear", lambda self: self._lengths.__setitem__(0, 0))


@bug("QUANT-09")
def the_error_is_squared(patch):
    mean = kvref.mean_absolute_error
    patch.setattr(kvref, "mean_absolute_error", lambda *args: mean(*args) ** 2)
