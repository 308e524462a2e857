"""Canaries described by integers only, as in the protocol's `engine.new`."""

from kvref.canary.shape import Canary
from kvref.errors import ConfigError, whole


def sized(
    *, num_layers: int, num_kv_heads: int, num_query_heads: int, head_dim: int, context: int, period: int, window: int = 0,
    recalls: int = 0,
) -> Canary:  # fmt: skip
    """Return the canary of these sizes.

    - `period`: the number of tokens after which it repeats itself. The offsets of its layers are proportional to 1, 2, 3, ... and
      add up to period - 1.
    - `window`: the window of every layer, 0 for none. With a window, each layer has the offset of the first place that it must
      not see, and `period` has no effect.
    - `recalls`: 1 for a last layer that recalls; the other layers then have the offset 1. theta is 1,000,000 then, otherwise
      10,000.

    Raises ConfigError.
    """
    num_layers = whole("num_layers", num_layers, 1 + bool(recalls))
    window, recalls = whole("window", window, 0), whole("recalls", recalls, 0, 1)
    period = whole("period", period, num_layers + 1)
    if recalls:
        offsets = [1] * (num_layers - 1)
    elif window:
        offsets = [window] * num_layers
    else:
        parts = num_layers * (num_layers + 1) // 2
        offsets = [max(1, round((period - 1) * (layer + 1) / parts)) for layer in range(num_layers)]
        offsets[-1] += period - 1 - sum(offsets)
    if min(offsets) < 1:
        raise ConfigError(f"period: expected a larger number for {num_layers} layers, got {period}")
    return Canary(
        tuple(offsets), bool(recalls), context, num_kv_heads, num_query_heads, head_dim, 1e6 if recalls else 1e4,
        windows=(window or None,) * num_layers,
    )  # fmt: skip
