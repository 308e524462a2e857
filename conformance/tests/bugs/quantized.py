"""Bugs in the quantized cache."""

import numpy as np

import kvref
from bugs.plant import bug, in_source
from kvref.quantized import QuantizedCache


@bug("QUANT-01", "LAW-01")
def a_step_is_half_pushed(patch):
    def stepwise(self, keys, values):
        for layer in range(self.config.num_layers):
            self.push(layer, keys[layer], values[layer])

    patch.setattr(QuantizedCache, "push_step", stepwise)


@bug("QUANT-02")
def a_full_layer_overwrites_its_last_token(patch):
    in_source(
        patch,
        "kvref.quantized.QuantizedCache._push",
        "self._lengths[layer] == self.config.capacity",
        "False",
        "slot = [self._lengths[layer]]",
        "self._lengths[layer] = min(self._lengths[layer], self.config.capacity - 1); slot = [self._lengths[layer]]",
    )


@bug("QUANT-03")
def heads_share_a_scale(patch):
    in_source(
        patch,
        "kvref.formats.symmetric.SymmetricRow.quantize",
        "xp.max(xp.abs(rows), axis=-1)",
        "xp.broadcast_to(xp.max(xp.abs(rows), axis=(-2, -1), keepdims=True)[..., 0], rows.shape[:-1])",
    )


@bug("QUANT-04")
def one_head_is_read_from_the_next(patch):
    in_source(patch, "kvref.quantized.QuantizedCache.read_head", "value[head, :]", "value[head - 1, :]")


@bug("QUANT-05")
def the_history_is_quantized_again_at_each_push(patch):
    push = QuantizedCache._push

    def requantizing(self, layers, keys, values):
        push(self, layers, keys, values)
        for layer in layers:
            every = range(self._lengths[layer])
            k, v = self._layers[layer].read(every)
            self._layers[layer].write(every, k * np.float32(1.01), v)

    patch.setattr(QuantizedCache, "_push", requantizing)


@bug("QUANT-07")
def scales_are_not_counted(patch):
    in_source(patch, "kvref.rows.RowStore.token_bytes", "+ 4 * scales", "")


@bug("QUANT-08", "LAW-05")
def clear_forgets_the_first_layer_only(patch):
    patch.setattr(QuantizedCache, "clear", lambda self: self._lengths.__setitem__(0, 0))


@bug("QUANT-09")
def the_error_is_squared(patch):
    mean = kvref.mean_absolute_error
    patch.setattr(kvref, "mean_absolute_error", lambda *args: mean(*args) ** 2)
