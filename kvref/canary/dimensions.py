"""The sizes of a canary, the scores of its layers by distance, and the rounding errors that it survives.

`Canary` is described in full. `sized` derives one from integers only, as in the protocol's `engine.new`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvref.errors import ConfigError, whole

NOTHING = -1  # the digit of a special token, and of values of zeros
UNKNOWN, BOS, EOS, BLANK, FIRST_WORD = range(5)  # token ids; BLANK is generated if bits are missing
CONSTANT = 16.0  # in the residual stream: much larger than a part, so that a damaged part hardly changes the norm
SHARPNESS = 600.0  # S, the score of the right place in nats. Below 65504 / sqrt(head_dim), for float16
KEY = 8.0  # the length of each rotary pair of a key
LOUDNESS = 32.0  # what one right bit adds to a token's logit
EPSILON = 1e-5  # of the RMS norms
SLOW = 0.5  # the largest rotation over a whole context, in radians, of a pair that contains a bit of a key
ROUNDINGS = 8  # position-dependent roundings of a compute dtype: cosine, product and sum, of query and key; the score; all others
LEAK = 1 / 64  # of a bit: the largest share of all other places together
# Limits, so that constructing a canary does not take minutes or many gigabytes.
MOST = {"context": 2**20, "num_kv_heads": 12, "num_query_heads": 256, "head_dim": 1024, "intermediate_size": 2**16}
MOST_TURNS = 2**27  # context * head_dim
MOST_WEIGHTS = 2**29

# The largest relative error of a score, |q e| / |q k|, by an error e of a key in each format. A relative error of u in each
# number gives u; an absolute error of at most a * KEY gives sqrt(2) a, because |cos| + |sin| <= sqrt(2). Steps, relative to the
# largest number: INT8 1 / 127, Q8 2 / 255, Q4 2 / 15.
KEY_ERRORS = {
    "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3,
    "int8": math.sqrt(2) / 254, "q8": math.sqrt(2) / 255, "q4": math.sqrt(2) / 15,
}  # fmt: skip
ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # unit roundoff of compute dtypes


@dataclass(frozen=True)
class Canary:
    """The sizes of a canary.

    - `offsets`: how many tokens back each layer copies from.
    - `recalls`: whether a last layer follows that finds the place whose predecessor is the current token, and returns the token
      at that place (an induction head). The last offset is then 1. A wrong key is visible too, and positions can be shifted.
    - `context`: the largest number of tokens of a session.
    - `num_kv_heads`, `num_query_heads`, `head_dim`, `intermediate_size`: as in a Llama. The MLPs are zero.
    - `theta`: the base of the rotary embedding.
    - `windows`: how many tokens each layer sees, the query's own included (WIN-01), None for all. If the window of a layer is as
      wide as its offset, it hides the place at the offset, and the layer copies from the first place in its window. An engine
      whose window is one too wide or too narrow then generates other tokens.
    - `num_pairs`: how many rotary pairs of a head queries use, beginning with the fastest. None: the number that distinguishes
      places best. With more pairs the canary is a finer precision probe of cache formats.

    Raises ConfigError for sizes of which there is no such model, or with which it could not distinguish places.
    """

    offsets: tuple[int, ...] = (16, 31)
    recalls: bool = False
    context: int = 1024
    num_kv_heads: int = 2
    num_query_heads: int = 4
    head_dim: int = 64
    theta: float = 10_000.0
    windows: tuple[int | None, ...] = ()
    intermediate_size: int = 64
    num_pairs: int | None = None
    bits: int = field(init=False)  # bits of a token per kv head

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            object.__setattr__(self, name, whole(name, getattr(self, name), maximum=most))
        object.__setattr__(self, "bits", -(-8 // self.num_kv_heads))
        object.__setattr__(self, "windows", self.windows or (None,) * self.num_layers)
        if self.num_query_heads % self.num_kv_heads:
            raise ConfigError(f"num_query_heads: expected a multiple of {self.num_kv_heads}, got {self.num_query_heads}")
        if self.head_dim % 2 or self.head_dim <= self.bits:
            raise ConfigError(f"head_dim: expected an even number above {self.bits}, got {self.head_dim}")
        if self.num_pairs is not None:
            whole("num_pairs", self.num_pairs, 1, self.head_dim // 2)
        if not self.theta > 1:
            raise ConfigError(f"theta: expected a number above 1, got {self.theta}")
        if self.context * self.head_dim > MOST_TURNS:
            raise ConfigError(f"context * head_dim: expected at most {MOST_TURNS}, got {self.context} * {self.head_dim}")
        if not self.offsets or min(self.offsets) < 1:
            raise ConfigError(f"offsets: expected one per layer, each at least 1, got {self.offsets}")
        if self.recalls and self.offsets[-1] != 1:
            raise ConfigError(f"offsets: expected 1 as the last one, before an induction head, got {self.offsets}")
        if len(self.windows) != self.num_layers:
            raise ConfigError(f"windows: expected one for each of {self.num_layers} layers, got {len(self.windows)}")
        for offset, window in zip(self.offsets, self.windows, strict=False):
            if window is not None and window < max(offset, 2):
                raise ConfigError(
                    f"windows: expected at least the offset, and at least 2, got {window} for an offset of {offset}"
                )
        if self.period >= self.context:
            raise ConfigError(f"context: expected more than the period, {self.period}, got {self.context}")
        if self.parts(self.num_layers).stop > self.hidden_size:
            raise ConfigError(
                f"num_query_heads * head_dim: expected at least {self.parts(self.num_layers).stop} for {self.num_layers} layers, "
                f"got {self.hidden_size}"
            )
        if self.num_weights > MOST_WEIGHTS:
            raise ConfigError(f"the sizes: expected at most {MOST_WEIGHTS} weights, got {self.num_weights}")
        for layer in range(self.num_layers):
            if self.margin(layer) <= 0:
                raise ConfigError(
                    f"layer {layer} cannot distinguish positions: expected a larger theta or head_dim, or a shorter context, "
                    f"got theta {self.theta}, head_dim {self.head_dim}, context {self.context}"
                )

    @property
    def num_layers(self) -> int:
        """The number of layers: one per offset, and one if the canary recalls."""
        return len(self.offsets) + self.recalls

    @property
    def period(self) -> int:
        """The number of tokens after which a canary repeats itself. If it recalls, it repeats any prompt of different tokens."""
        return sum(map(self.reach, range(len(self.offsets)))) + 1

    def reach(self, layer: int) -> int:
        """Return how many tokens back a layer copies from: its offset, or the first token of its window."""
        window = self.windows[layer]
        return self.offsets[layer] if window is None else min(self.offsets[layer], window - 1)

    @property
    def hidden_size(self) -> int:
        """The width of the residual stream: num_query_heads * head_dim."""
        return self.num_query_heads * self.head_dim

    @property
    def words(self) -> int:
        """The number of tokens with bits. Their ids are `[FIRST_WORD, FIRST_WORD + words)`."""
        return int(2 ** (self.num_kv_heads * self.bits))

    @property
    def vocabulary(self) -> int:
        """The number of token ids: a multiple of 64."""
        return -(-(FIRST_WORD + self.words) // 64) * 64

    @property
    def num_weights(self) -> int:
        """The number of weights, norms excluded."""
        layer = 2 * (self.num_query_heads + self.num_kv_heads) * self.head_dim + 3 * self.intermediate_size
        return self.hidden_size * (2 * self.vocabulary + self.num_layers * layer)

    @property
    def frequencies(self) -> NDArray[np.float64]:
        """The rotation of each pair of a head in radians per position: theta ** (-2 i / head_dim), float64 [head_dim / 2]."""
        return np.asarray(self.theta ** (-2 * np.arange(self.head_dim // 2) / self.head_dim), np.float64)

    def parts(self, layer: int) -> range:
        """Return where in the residual stream the newest part before a layer is: per head, one number per bit and one more."""
        size = self.num_kv_heads * (self.bits + 1)
        return range(1 + layer * size, 1 + (layer + 1) * size)

    def looks_up(self, layer: int) -> bool:
        """Return whether the layer is the one that recalls."""
        return self.recalls and layer == self.num_layers - 1

    def pairs(self, layer: int) -> range:
        """Return the rotary pairs of a head that a layer's query uses.

        A layer that copies by distance uses the fastest pairs, `num_pairs` of them or the number with the widest gap. A layer
        that recalls uses the slowest pairs, which hardly rotate over a context, so that they can contain bits. Raises ConfigError
        if there are too few of them.
        """
        if self.looks_up(layer):
            slow = int((self.frequencies * self.context <= SLOW).sum())
            bits = self.num_kv_heads * self.bits
            if slow < bits:
                raise ConfigError(
                    f"theta, head_dim, context: expected {bits} pairs that rotate by at most {SLOW} radians, got {slow} "
                    f"with theta {self.theta}, head_dim {self.head_dim} and context {self.context}"
                )
            return range(self.head_dim // 2 - slow // bits * bits, self.head_dim // 2)
        if self.num_pairs is not None:
            return range(self.num_pairs)
        away = 1 - np.cos(np.arange(1, self.context)[:, None] * self.frequencies)
        least = (np.cumsum(away, axis=1) / np.arange(1, self.head_dim // 2 + 1)).min(axis=0)
        return range(int(least.argmax()) + 1)

    def gap(self, layer: int) -> float:
        """Return the smallest difference of the best score and the second best in the context, as a share of the best score."""
        if self.looks_up(layer):  # the right place, rotated most, against one wrong bit that alone is rotated most
            least = float(self.nearness(layer, np.arange(self.context)).min())
            return least - 1 + (1 + math.cos(SLOW)) / (self.num_kv_heads * self.bits)
        seen = self.nearness(layer, np.arange(min(self.context, self.windows[layer] or self.context)))
        return float(seen[self.reach(layer)] - np.delete(seen, self.reach(layer)).max())

    def margin(self, layer: int, key_error: float = 0.0, roundoff: float = 2.0**-24) -> float:
        """Return the margin of a layer in nats, in the worst case of all rounding errors (chapter ENG).

        key_error: the relative error of a score by storing keys (KEY_ERRORS). roundoff: the unit roundoff of the engine's
        arithmetic. If the margin is positive, no rounding can change a token. Otherwise the canary is a precision probe.
        """
        error = 2 * (key_error + ROUNDINGS * roundoff)
        return SHARPNESS * (self.gap(layer) - error) - math.log(self.context / LEAK)

    def survives(self, format: str, compute: str = "float32") -> bool:
        """Return whether rounding in a cache of this format, with arithmetic in `compute`, can change no token.

        format: a key of KEY_ERRORS. compute: a key of ROUNDOFF. If it returns false, the canary is a precision probe.
        """
        return all(self.margin(layer, KEY_ERRORS[format], ROUNDOFF[compute]) > 0 for layer in range(self.num_layers))

    def nearness(self, layer: int, back: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the scores of places by distance, as a share of the best score: at most 1, in the shape of `back`."""
        turned = back - (0 if self.looks_up(layer) else self.offsets[layer])
        return np.asarray(np.cos(turned[:, None] * self.frequencies[list(self.pairs(layer))]).mean(axis=1))

    def digits(self, token: int) -> list[int]:
        """Return the digit of a token per kv head, which is `bits` of its bits; NOTHING for a special token."""
        number = token - FIRST_WORD
        if not 0 <= number < self.words:
            return [NOTHING] * self.num_kv_heads
        return [number >> head * self.bits & 2**self.bits - 1 for head in range(self.num_kv_heads)]

    def token(self, digits: Sequence[int]) -> int:
        """Return the token with these digits, one per kv head; BLANK if one of them is NOTHING."""
        if NOTHING in digits:
            return BLANK
        return FIRST_WORD + sum(digit << head * self.bits for head, digit in enumerate(digits))

    def signs(self, digits: Sequence[int]) -> NDArray[np.float64]:
        """Return the bits of digits as +1 and -1: float64 [num_kv_heads, bits], zeros for NOTHING."""
        heads = np.array(digits)[:, None]
        return np.where(heads >= 0, (heads >> np.arange(self.bits) & 1) * 2.0 - 1, 0.0)


def sized(
    *, num_layers: int, num_kv_heads: int, num_query_heads: int, head_dim: int, context: int, period: int, window: int = 0,
    recalls: int = 0, recurrent: int = 0,
) -> Canary:  # fmt: skip
    """Return the canary of these sizes.

    - `period`: the number of tokens after which it repeats itself. The offsets of its layers are proportional to 1, 2, 3, ... and
      add up to period - 1.
    - `window`: the window of every layer, 0 for none. With a window, each layer has the offset of the first place that it must
      not see, and `period` has no effect.
    - `recalls`: 1 for a last layer that recalls; the other layers then have the offset 1. theta is 1,000,000 then, otherwise
      10,000.
    - `recurrent`: 0. `kvref.canary.hybrid.engine_canary` returns the canaries with recurrent state.

    Raises ConfigError.
    """
    whole("recurrent", recurrent, 0, 0)
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
