"""Hybrid canaries: models with recurrent state whose tokens prove which state was read, and the oracle of what they generate.

A hybrid model has layers that keep a state of fixed size per sequence: the last inputs of a convolution, or a matrix. Such a
state is valid for exactly one length. It cannot be truncated, a fork has to copy it, and a rejected draft must not have changed
it. Each architecture of ARCHITECTURES has a canary:

- `lfm2`: a convolution that returns its input of two tokens before, attention that copies from 42 tokens before, and a second
  such convolution. It repeats any prompt of 47 words, as the canary with attention does.
- `mamba2`: a matrix with a cell per low syllable. It returns the word that followed the current low syllable last. What was
  written 16 tokens earlier weighs 1/16, so that the newest word is read.
- `falcon-h1`: attention returns the low syllable of the next word (that of 15 tokens before), a matrix as in `mamba2` its high
  syllable.
- `qwen3.5`: as `falcon-h1`, but a write to the matrix overwrites the cell (the gated delta rule without decay).
- `granite-moe-hybrid` and `bamba`: as `falcon-h1`, with the matrix and attention in consecutive layers.
- `qwen3-next`: as `qwen3.5`, with the projections of Qwen3-Next and experts.
- `nemotron-h`: as `falcon-h1`, but attention has no positions. A first layer returns the word before, which makes it the key.
  Attention looks the current word up, as it was a lap ago, and returns the low syllable of what followed it.
- `kimi-linear`: as `nemotron-h`, with the delta rule in place of a decayed matrix, and attention with latents.

A word has 8 bits: its low and its high syllable (`Canary.digits`). All canaries but LFM2's return the high syllable plus one.
Their prompts are *laps* of 16 words: the low syllables are one order of all 16, the same in each lap, and the high syllable is
the number of the lap. The canary continues with the next laps. If a prompt only repeated itself, each write would store what is
stored already, and a stale state would go unnoticed. In laps each word names its lap.
"""

import copy
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvref.canary.dimensions import NOTHING, Canary, sized
from kvref.canary.oracle import Oracle
from kvref.errors import ConfigError, in_range, whole

LAP = 16  # words, and the number of syllables
TAPS = 3  # inputs that a convolution of LFM2 sees, the current one included
LFM2_DISTANCE = 42  # tokens back from which the attention of LFM2 copies
DECAY = 1 / 16  # weight of what was written a lap ago, in mamba2 and falcon-h1
CONTEXT = 1024  # the largest number of tokens of a session
BITS = 4  # of a syllable
BLANK_BITS = 6.0  # bits whose logit is that of BLANK
SURE = 0.25  # bits by which a logit has to exceed the others, or a bit its opposite
FAINT = 1e-3  # weight below which the oracle does not predict what is read from a decayed matrix

# Attention that looks a word up: what each equal bit of the word adds to the score, and what each bit of the value adds. Weights
# differ, so that also a wrong state has one best place, as a rule. Fewer than SURE_SCORE between two places do not select one.
LOOKUP_WEIGHTS = np.array([8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0])
VALUE_WEIGHTS = np.array([0.5, 1.0, 2.0, 4.0])
SURE_SCORE = 0.75

UNSURE = None
WORDS = Canary(context=CONTEXT)  # the words of all hybrid canaries: two syllables of four bits
# The bits of each token as +1 and -1, zeros for special ones: float64 [vocabulary, 2 * BITS].
CODES = np.array([WORDS.signs(WORDS.digits(token)).reshape(-1) for token in range(WORDS.vocabulary)])
LOW_SCORES = WORDS.signs([*range(LAP), NOTHING]) @ VALUE_WEIGHTS  # of a low syllable as a value


@dataclass(frozen=True)
class Architecture:
    """The parts of a hybrid canary of which the oracle keeps the state.

    title: the name of the architecture in text. delays: by how many tokens each convolution delays a word. The first one is
    before attention. copies_from: how many tokens back attention reads; 0 if it does not. looks_up: whether attention, without
    positions, looks the word up. matrix_bits: how many of the last bits of a word the matrix returns; 0 without a matrix.
    overwrites: whether a write to the matrix replaces the cell.
    """

    title: str
    delays: tuple[int, ...] = ()
    copies_from: int = 0
    looks_up: bool = False
    matrix_bits: int = BITS
    overwrites: bool = False

    @property
    def attends(self) -> bool:
        return self.looks_up or self.copies_from > 0

    @property
    def continues_laps(self) -> bool:
        """Whether the prompts are laps, which the canary continues. If not, it repeats any prompt of a period."""
        return self.matrix_bits > 0

    @property
    def prompt_length(self) -> int:
        """The number of tokens after which the next one of a text is predicted: a period, or a lap and a word."""
        return LAP + 1 if self.continues_laps else self.copies_from + sum(self.delays) + 1


ARCHITECTURES = {  # in the order of the size `recurrent`, which counts from 1
    "lfm2": Architecture("LFM2", delays=(TAPS - 1, TAPS - 1), copies_from=LFM2_DISTANCE, matrix_bits=0),
    "mamba2": Architecture("Mamba-2", matrix_bits=2 * BITS),
    "falcon-h1": Architecture("Falcon-H1", copies_from=LAP - 1),
    "qwen3.5": Architecture("Qwen3.5", copies_from=LAP - 1, overwrites=True),
    "granite-moe-hybrid": Architecture("Granite 4", copies_from=LAP - 1),
    "bamba": Architecture("Bamba", copies_from=LAP - 1),
    "nemotron-h": Architecture("Nemotron-H", delays=(1,), looks_up=True),
    "qwen3-next": Architecture("Qwen3-Next", copies_from=LAP - 1, overwrites=True),
    "kimi-linear": Architecture("Kimi Linear", delays=(1,), looks_up=True, overwrites=True),
}
HYBRIDS = tuple(ARCHITECTURES)


@dataclass(frozen=True)
class HybridCanary:
    """A hybrid canary, with the attributes of `Canary` that describe its words and prompts.

    architecture: one of HYBRIDS. context: the largest number of tokens of a session. Raises ConfigError.
    """

    architecture: str
    context: int = CONTEXT
    recalls: bool = field(default=False, init=False)
    windows: tuple[int | None, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        require_hybrid(self.architecture)
        object.__setattr__(self, "context", whole("context", self.context, maximum=CONTEXT))

    @property
    def period(self) -> int:
        """The number of tokens of a text after which it is continued: `prompt_length`."""
        return prompt_length(self.architecture)

    @property
    def continues_laps(self) -> bool:
        """Whether its prompts are laps, which it continues. If not, it repeats any prompt of a period."""
        return ARCHITECTURES[self.architecture].continues_laps

    @property
    def words(self) -> int:
        return WORDS.words

    @property
    def vocabulary(self) -> int:
        return WORDS.vocabulary

    @property
    def bits(self) -> int:
        return WORDS.bits

    @property
    def num_kv_heads(self) -> int:
        """The number of syllables of a word."""
        return WORDS.num_kv_heads

    def digits(self, token: int) -> list[int]:
        return WORDS.digits(token)


AnyCanary = Canary | HybridCanary


class Delay:
    """The state of a convolution that returns its input of `distance` tokens before, NOTHING before the first."""

    def __init__(self, distance: int) -> None:
        self.inputs = deque([(NOTHING, NOTHING)] * distance, distance)

    def push(self, digits: tuple[int, int]) -> tuple[int, int]:
        """Append an input and return the oldest one."""
        oldest = self.inputs[0]
        self.inputs.append(digits)
        return oldest


class Distance:
    """The cache of an attention layer that copies from `distance` tokens before."""

    def __init__(self, distance: int) -> None:
        self.distance, self.entries = distance, list[tuple[int, int]]()

    def push(self, digits: tuple[int, int]) -> tuple[int, int] | None:
        """Append an entry and return the one that is read; None if there are too few, of which the nearest score decides."""
        self.entries.append(digits)
        return self.entries[-1 - self.distance] if len(self.entries) > self.distance else UNSURE


class Lookup:
    """The cache of an attention layer without positions. The key of an entry is the word before it, its value a low syllable.

    entries: whether there is an entry with this key and value, [vocabulary, LAP + 1]; the last value is NOTHING.
    """

    def __init__(self) -> None:
        self.entries = np.zeros((WORDS.vocabulary, LAP + 1), bool)

    def push(self, before: tuple[int, int], digits: tuple[int, int]) -> tuple[int, int] | None:
        """Append the entry of a word. Return the low syllable in the entry whose key agrees best with the word of a lap ago.

        before: the word before. That of a lap ago has the same low syllable, and the high one less one. A special token has no
        bits: as a key it scores zero. The result is None if entries with other values have nearly the same score.
        """
        low, high = digits
        self.entries[WORDS.token(before), low] = True
        query = LOOKUP_WEIGHTS * CODES[WORDS.token([low, lap_before(high)])]
        scores = np.where(self.entries, (CODES @ query)[:, None] + LOW_SCORES, -np.inf)
        (best, *others) = np.unique(np.nonzero(scores > scores.max() - SURE_SCORE)[1])
        return UNSURE if others else (NOTHING if best == LAP else int(best), NOTHING)


class Matrix:
    """A state matrix with a cell per low syllable, and the convolution input that selects the cell which is written.

    cells: the weight of each bit value, float64 [LAP, bits]; totals: the sum of all weights written to each cell, float64 [LAP].
    decay: the factor per token. overwrites: whether a write replaces the cell (the delta rule) or is added to it.
    """

    def __init__(self, bits: int, decay: float, overwrites: bool) -> None:
        self.cells, self.totals = np.zeros((LAP, bits)), np.zeros(LAP)
        self.decay, self.overwrites, self.previous = decay, overwrites, NOTHING

    def push(self, low: int, signs: NDArray[np.float64] | None) -> NDArray[np.float64] | None:
        """Write the bits of a word to the cell of the previous low syllable, and return those in the cell of its own.

        Each bit that is returned has its sign and, as its size, the contribution to the logit. All are zeros in an empty cell.
        The result is None if the cell is too faint. A special token has the syllable NOTHING. It writes no bits, which empties a
        cell that is overwritten, and it reads zeros.
        """
        self.cells *= self.decay
        self.totals *= self.decay
        if self.previous != NOTHING and (signs is not None or self.overwrites):
            keep = 0.0 if self.overwrites else 1.0
            own = np.zeros(self.cells.shape[1]) if signs is None else signs
            self.cells[self.previous] = keep * self.cells[self.previous] + own
            self.totals[self.previous] = keep * self.totals[self.previous] + (signs is not None)
        self.previous = low
        if low == NOTHING or not self.totals[low]:
            return np.zeros(self.cells.shape[1])
        if self.totals[low] < FAINT:
            return UNSURE
        # A bit is stored as (on, off). The norm after the matrix divides by the root mean square of both, over all bits.
        cell, total = self.cells[low], self.totals[low]
        return np.asarray(cell / np.sqrt((total**2 + np.mean(cell**2)) / 2))


@dataclass
class HybridOracle:
    """What a hybrid canary has to generate, from its state. Change the state, and the oracle predicts the tokens of that fault.

    architecture: one of HYBRIDS. The state is in `delays`, `attention` and `matrix`, each None or empty if the architecture has
    none.
    """

    architecture: str
    delays: list[Delay] = field(init=False)
    attention: Distance | Lookup | None = field(init=False)
    matrix: Matrix | None = field(init=False)
    tokens: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        require_hybrid(self.architecture)
        parts = ARCHITECTURES[self.architecture]
        self.delays = [Delay(distance) for distance in parts.delays]
        attention = Lookup() if parts.looks_up else Distance(parts.copies_from)
        self.attention = attention if parts.attends else None
        decay = 1.0 if parts.overwrites else DECAY ** (1 / LAP)
        self.matrix = Matrix(parts.matrix_bits, decay, parts.overwrites) if parts.matrix_bits else None

    def fork(self) -> "HybridOracle":
        """Return an oracle with a copy of the state."""
        return copy.deepcopy(self)

    def upto(self, length: int) -> "HybridOracle":
        """Return an oracle with the first `length` tokens. It computes the state again, because a state has one length."""
        other = HybridOracle(self.architecture)
        other.extend(self.tokens[:length])
        return other

    def extend(self, tokens: Iterable[int]) -> list[int | None]:
        """Append tokens. Return for each the token that follows it, or None if the oracle does not predict it."""
        return [self._push(token) for token in tokens]

    def generate(self, token: int, count: int) -> list[int | None]:
        """Append `token`, and return the `count` tokens that follow, up to the first None."""
        said = self.extend([token])[:count]
        while len(said) < count and said[-1] is not None:
            said += self.extend([said[-1]])
        return said

    def _push(self, token: int) -> int | None:
        self.tokens.append(token)
        low, high = WORDS.digits(token)
        return self._copy(low, high) if self.matrix is None else self._recall(self.matrix, low, high)

    def _copy(self, low: int, high: int) -> int | None:
        """A word as LFM2 reads it: through a convolution, attention and the second convolution."""
        assert isinstance(self.attention, Distance)
        first, second = self.delays
        answer = second.push(self.attention.push(first.push((low, high))) or (UNREAD, UNREAD))
        return UNSURE if UNREAD in answer else WORDS.token(answer)

    def _recall(self, matrix: Matrix, low: int, high: int) -> int | None:
        """A word as the other models read it: the last bits from the matrix, the first from attention if there is any."""
        signs = None if low == NOTHING else WORDS.signs([low, high]).reshape(-1)[-matrix.cells.shape[1] :]
        bits = matrix.push(low, signs)
        if self.attention is not None:
            copied = self._read_low(self.attention, low, high)
            bits = None if bits is None or copied is UNSURE else np.concatenate([WORDS.signs(copied)[0], bits])
        return UNSURE if bits is None else _token_of(bits)

    def _read_low(self, attention: Distance | Lookup, low: int, high: int) -> tuple[int, int] | None:
        """Append a word to the cache of attention, and return the low syllable that it reads."""
        if isinstance(attention, Distance):
            return attention.push((low, NOTHING))
        return attention.push(self.delays[0].push((low, high)), (low, high))


UNREAD = -3  # a digit that the oracle does not predict


def _token_of(bits: NDArray[np.float64]) -> int | None:
    """The token with the largest logit. bits: the contribution of each bit. None if another token has nearly the same logit."""
    loudness = float(np.abs(bits).sum())
    if loudness < BLANK_BITS - SURE:
        return WORDS.token([NOTHING, NOTHING])
    if loudness < BLANK_BITS + SURE or np.abs(bits).min() < SURE:
        return UNSURE
    low, high = (int(((half > 0) << np.arange(BITS)).sum()) for half in bits.reshape(2, BITS))
    return WORDS.token([low, (high + 1) % LAP])


def lap_before(high: int) -> int:
    """Return the high syllable of the lap before, NOTHING for that of a special token."""
    return NOTHING if high == NOTHING else (high - 1) % LAP


def require_hybrid(architecture: str) -> None:
    """Raises ConfigError for a name that is not in HYBRIDS."""
    if architecture not in HYBRIDS:
        raise ConfigError(f"architecture: expected one of {', '.join(HYBRIDS)}, got {architecture!r}")


def laps(order: Sequence[int], start: int, count: int) -> list[int]:
    """Return the first `count` tokens of laps: word i has the low syllable order[i % 16] and the high one of lap start + i // 16.

    order: an order of the 16 syllables. Raises ConfigError for another one or a negative count.
    """
    count = whole("count", count, 0)
    if sorted(order) != list(range(LAP)):
        raise ConfigError(f"order: expected each of 0 to {LAP - 1} once, got {list(order)}")
    return [WORDS.token([order[at % LAP], (start + at // LAP) % LAP]) for at in range(count)]


def continued_text(architecture: str, seed: int, count: int) -> list[int]:
    """Return `count` tokens of a text that the canary continues once it has read `prompt_length` of them. seed: selects one text.

    LFM2 repeats random words; the others make laps.
    """
    require_hybrid(architecture)
    count = whole("count", count, 0)
    rng = np.random.default_rng(in_range(seed, 2**32, ConfigError, "seed"))
    if ARCHITECTURES[architecture].continues_laps:
        return laps(rng.permutation(LAP).tolist(), int(rng.integers(LAP)), count)
    digits = rng.integers(LAP, size=(prompt_length(architecture), 2))
    period = [int(WORDS.token([int(low), int(high)])) for low, high in digits]
    return [period[at % len(period)] for at in range(count)]


def prompt_length(architecture: str) -> int:
    """Return the number of tokens after which the canary predicts the next token of a text: a period, or a lap and a word."""
    require_hybrid(architecture)
    return ARCHITECTURES[architecture].prompt_length


def engine_canary(*, recurrent: int = 0, **sizes: int) -> AnyCanary:
    """Return the canary of an engine with these sizes, as in the protocol's `engine.new`.

    recurrent: 0 for `sized(**sizes)`, otherwise the place of the architecture in HYBRIDS, counted from 1. The sizes of a hybrid
    canary are fixed: of `sizes` only the context has an effect, but all have to be valid. Raises ConfigError.
    """
    recurrent, attention = whole("recurrent", recurrent, 0, len(HYBRIDS)), sized(**sizes)
    return HybridCanary(HYBRIDS[recurrent - 1], attention.context) if recurrent else attention


def new_oracle(canary: AnyCanary) -> Oracle | HybridOracle:
    """Return the oracle of a canary, without tokens."""
    return Oracle(canary) if isinstance(canary, Canary) else HybridOracle(canary.architecture)
