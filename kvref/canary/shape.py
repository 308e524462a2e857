"""The sizes of a canary, what they make of a distance, and how much rounding that survives."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvref.errors import ConfigError, whole

NOTHING = -1  # what a head carries of a special token, and of zeros
UNKNOWN, BOS, EOS, BLANK, FIRST_WORD = range(5)  # token ids; blank: what it says where bits are missing
CONSTANT = 16.0  # in the residual stream: far above a part, so that a damaged part hardly moves the norm
SHARPNESS = 600.0  # the score, in nats, of what is looked for; S above. Below 65504 / sqrt(head_dim), for float16
KEY = 8.0  # the length of each pair of a key
LOUDNESS = 32.0  # what one bit adds to a token's logit
EPSILON = 1e-5  # of the norms
SLOW = 0.5  # radians that a pair may turn over a whole context and still carry what a key says
ROUNDINGS = 8  # by a compute dtype of what varies with position: cosine, product, sum of query and of key; the score; all else
LEAK = 1 / 64  # of a bit, at most, from all other places together
# At most, so that no sizes take minutes or many gigabytes to make.
MOST = {"context": 2**20, "num_kv_heads": 12, "num_query_heads": 256, "head_dim": 1024, "intermediate_size": 2**16}
MOST_TURNS = 2**27  # context * head_dim
MOST_WEIGHTS = 2**29

# What a format may do to a key, as a share of KEY: |q e| / |q k| at most. A relative error of u does u; an error of e at most in
# each number does sqrt(2) e, for |cos| + |sin| <= sqrt(2). Steps: of INT8 1 / 127, of Q8 2 / 255, of Q4 2 / 15 of the largest.
KEY_ERRORS = {
    "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3,
    "int8": math.sqrt(2) / 254, "q8": math.sqrt(2) / 255, "q4": math.sqrt(2) / 15,
}  # fmt: skip
ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # of a compute dtype


@dataclass(frozen=True)
class Canary:
    """offsets: how far back each layer looks. windows: tokens that each layer sees, the query's own among them; None for all.

    A window as wide as the offset hides that place, and the layer finds the one before it: an engine whose window is one too
    wide or too narrow then says another token. recalls: behind those layers stands one that looks for the place whose bits, as
    the last layer left them, are those of the current token, and says what came next there. The offset before it is 1. With it
    a wrong key shows too, and positions may be shifted. num_pairs: of a head, that queries look back by, the fastest ones; None
    for as many as tell places apart best. More of them make a finer ruler of what a cache format does to keys.

    Raises ConfigError for sizes that make no such model, and for those at which it could not tell places apart.
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
    bits: int = field(init=False)  # of a token that each kv head carries

    def __post_init__(self) -> None:
        for name, most in MOST.items():
            object.__setattr__(self, name, whole(name, getattr(self, name), maximum=most))
        object.__setattr__(self, "bits", -(-8 // self.num_kv_heads))
        object.__setattr__(self, "windows", self.windows or (None,) * self.num_layers)
        if self.num_query_heads % self.num_kv_heads:
            raise ConfigError(f"num_query_heads: expected a multiple of {self.num_kv_heads}, got {self.num_query_heads}")
        if self.head_dim % 2 or self.head_dim <= self.bits:
            raise ConfigError(f"head_dim: expected an even number over {self.bits}, got {self.head_dim}")
        if self.num_pairs is not None:
            whole("num_pairs", self.num_pairs, 1, self.head_dim // 2)
        if not self.theta > 1:
            raise ConfigError(f"theta: expected more than 1, got {self.theta}")
        if self.context * self.head_dim > MOST_TURNS:
            raise ConfigError(f"context * head_dim: expected at most {MOST_TURNS}, got {self.context} * {self.head_dim}")
        if not self.offsets or min(self.offsets) < 1:
            raise ConfigError(f"offsets: expected one a layer, each at least 1, got {self.offsets}")
        if self.recalls and self.offsets[-1] != 1:
            raise ConfigError(f"offsets: expected the last to be 1 before a layer that recalls, got {self.offsets}")
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
                    f"layer {layer} could not tell places apart: expected a larger theta or head_dim, or a shorter context, "
                    f"got theta {self.theta}, head_dim {self.head_dim}, context {self.context}"
                )

    @property
    def num_layers(self) -> int:
        return len(self.offsets) + self.recalls

    @property
    def period(self) -> int:
        """Tokens after which an offset canary repeats itself. A recall canary repeats any prompt whose tokens all differ."""
        return sum(map(self.reach, range(len(self.offsets)))) + 1

    def reach(self, layer: int) -> int:
        """How far back the place lies that a layer finds: its offset, or the end of its window."""
        window = self.windows[layer]
        return self.offsets[layer] if window is None else min(self.offsets[layer], window - 1)

    @property
    def hidden_size(self) -> int:
        return self.num_query_heads * self.head_dim

    @property
    def words(self) -> int:
        """Tokens that carry bits: ids FIRST_WORD and up."""
        return int(2 ** (self.num_kv_heads * self.bits))

    @property
    def vocabulary(self) -> int:
        return -(-(FIRST_WORD + self.words) // 64) * 64

    @property
    def num_weights(self) -> int:
        """Without the norms."""
        layer = 2 * (self.num_query_heads + self.num_kv_heads) * self.head_dim + 3 * self.intermediate_size
        return self.hidden_size * (2 * self.vocabulary + self.num_layers * layer)

    @property
    def frequencies(self) -> NDArray[np.float64]:
        """Radians a position that each pair of a head turns: theta ** (-2 i / head_dim), [head_dim / 2]."""
        return np.asarray(self.theta ** (-2 * np.arange(self.head_dim // 2) / self.head_dim), np.float64)

    def parts(self, layer: int) -> range:
        """Where in the residual stream a layer finds the newest part: a number a bit and one a head, head by head."""
        size = self.num_kv_heads * (self.bits + 1)
        return range(1 + layer * size, 1 + (layer + 1) * size)

    def looks_up(self, layer: int) -> bool:
        return self.recalls and layer == self.num_layers - 1

    def pairs(self, layer: int) -> range:
        """The pairs of a head that a layer's query uses.

        To copy by distance: the fastest, as many as tell k from every other distance best, unless it is said how many. To look
        up: the slowest, for what they carry has hardly turned at any distance.
        """
        if self.looks_up(layer):
            slow = int((self.frequencies * self.context <= SLOW).sum())
            bits = self.num_kv_heads * self.bits
            if slow < bits:
                raise ConfigError(
                    f"theta, head_dim, context: expected {bits} pairs that turn at most {SLOW} radians, got {slow} "
                    f"of theta {self.theta}, head_dim {self.head_dim} and context {self.context}"
                )
            return range(self.head_dim // 2 - slow // bits * bits, self.head_dim // 2)
        if self.num_pairs is not None:
            return range(self.num_pairs)
        away = 1 - np.cos(np.arange(1, self.context)[:, None] * self.frequencies)
        least = (np.cumsum(away, axis=1) / np.arange(1, self.head_dim // 2 + 1)).min(axis=0)
        return range(int(least.argmax()) + 1)

    def gap(self, layer: int) -> float:
        """How far the second best place lies below the best, as a share of the best score, at any distance in the context."""
        if self.looks_up(layer):  # all bits right and turned the most, beside one bit wrong and that alone turned the most
            least = float(self.nearness(layer, np.arange(self.context)).min())
            return least - 1 + (1 + math.cos(SLOW)) / (self.num_kv_heads * self.bits)
        seen = self.nearness(layer, np.arange(min(self.context, self.windows[layer] or self.context)))
        return float(seen[self.reach(layer)] - np.delete(seen, self.reach(layer)).max())

    def margin(self, layer: int, key_error: float = 0.0, roundoff: float = 2.0**-24) -> float:
        """Nats left when keys are stored with `key_error` (a share of KEY) and computing rounds by `roundoff`: the worst case.

        Positive: no rounding can change a token. Otherwise the canary only measures (see `survives`).
        """
        error = 2 * (key_error + ROUNDINGS * roundoff)
        return SHARPNESS * (self.gap(layer) - error) - math.log(self.context / LEAK)

    def survives(self, format: str, compute: str = "float32") -> bool:
        """Whether a cache of this format changes no token, whatever it rounds; where not, the canary measures what it does."""
        return all(self.margin(layer, KEY_ERRORS[format], ROUNDOFF[compute]) > 0 for layer in range(self.num_layers))

    def nearness(self, layer: int, back: NDArray[np.int64]) -> NDArray[np.float64]:
        """How well places lie, by how far back they lie: at most 1."""
        turned = back - (0 if self.looks_up(layer) else self.offsets[layer])
        return np.asarray(np.cos(turned[:, None] * self.frequencies[list(self.pairs(layer))]).mean(axis=1))

    def digits(self, token: int) -> list[int]:
        """What each kv head carries of a token, or NOTHING of a special one."""
        number = token - FIRST_WORD
        if not 0 <= number < self.words:
            return [NOTHING] * self.num_kv_heads
        return [number >> head * self.bits & 2**self.bits - 1 for head in range(self.num_kv_heads)]

    def token(self, digits: Sequence[int]) -> int:
        """The token of which the heads carry these digits; BLANK where one carries NOTHING."""
        if NOTHING in digits:
            return BLANK
        return FIRST_WORD + sum(digit << head * self.bits for head, digit in enumerate(digits))

    def signs(self, digits: Sequence[int]) -> NDArray[np.float64]:
        """The bits of what the heads carry as +1 and -1, head by head, [num_kv_heads, bits]; of NOTHING zeros."""
        heads = np.array(digits)[:, None]
        return np.where(heads >= 0, (heads >> np.arange(self.bits) & 1) * 2.0 - 1, 0.0)
