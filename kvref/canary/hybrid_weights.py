"""The weights of the hybrid canaries, by their names in checkpoints of transformers.

The residual stream of all four has a constant, the bits of the current word (+1 or -1), a number that gives special tokens,
which have no bits, the same length, and parts in which layers write bits. The squares of all numbers add up to a known sum at
each layer, so that the weight of each RMS norm undoes the norm.

SiLU is a switch: an input of ON passes as ON, one of -ON or less as nearly 0. A bit is therefore stored as two numbers, of which
one is on: the first for a one, the second for a zero. Reading takes the difference. A gate that must be open reads the constant.
"""

import math

import numpy as np
from numpy.typing import NDArray

from kvref.canary.dimensions import BLANK, CONSTANT, EPSILON, FIRST_WORD, LOUDNESS, SHARPNESS, Canary
from kvref.canary.hybrid import BITS, BLANK_BITS, CONTEXT, DECAY, LAP, LFM2_DISTANCE, TAPS, WORDS, require_hybrid
from kvref.canary.weights import Weights, weights

Tensors = dict[str, NDArray[np.float64]]

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64  # of attention; the head_dim of qwen3.5 is four times as large, of which a quarter rotates
HIDDEN, INTERMEDIATE = HEADS * HEAD_DIM, 64
QWEN_HEAD_DIM = 4 * HEAD_DIM
MAMBA_HEAD_DIM, STATE_SIZE, KERNEL = 64, 128, 4  # a head per bit; several rows of the state per syllable; taps of the convolution
DELTA_HEADS, DELTA_DIM = 2, 128  # heads of the delta rule, and numbers of its keys and of its values
TIME_STEP = 2.0**-8
ON = 32.0
OPEN = 16.0  # input of a gate: silu(16) is 16, to float32's precision

WORD = slice(1, 9)  # the bits of the current word
SPECIAL, BLANK_LEVEL = 9, 10
PARTS = [slice(start, start + 8) for start in (11, 19, 27)]  # bits that layers write
WORD_SQUARE = CONSTANT**2 + 8  # sum of the squares of an embedding


def hybrid_weights(architecture: str) -> Weights:
    """Return the weights of a hybrid canary, float32, by name. Raises ConfigError for an unknown architecture."""
    require_hybrid(architecture)
    make = {"lfm2": _lfm2, "mamba2": _mamba2, "falcon-h1": _falcon_h1, "qwen3.5": _qwen35}[architecture]
    return {name: np.ascontiguousarray(array, np.float32) for name, array in make().items()}


def _codes() -> NDArray[np.float64]:
    """The bits of each token as +1 and -1, zeros for special ones, float64 [vocabulary, 8]."""
    return np.array([WORDS.signs(WORDS.digits(token)).reshape(-1) for token in range(WORDS.vocabulary)])


def _embeddings() -> NDArray[np.float64]:
    made = np.zeros((WORDS.vocabulary, HIDDEN))
    made[:, 0], made[:, WORD] = CONSTANT, _codes()
    made[:, SPECIAL] = math.sqrt(8) * (made[:, WORD] == 0).all(axis=1)
    return made


def _output() -> NDArray[np.float64]:
    """The output projection. It reads bits in the first part; the high syllable of a word is one more than that of its row."""
    made = np.zeros((WORDS.vocabulary, HIDDEN))
    codes = _codes()
    for token in range(FIRST_WORD, FIRST_WORD + WORDS.words):
        low, high = WORDS.digits(token)
        made[token, PARTS[0]] = LOUDNESS * codes[WORDS.token([low, (high - 1) % LAP])]
    made[BLANK, 0] = LOUDNESS * BLANK_BITS / CONSTANT
    return made


def _norm(*added: float) -> NDArray[np.float64]:
    """The weight of an RMS norm that undoes the norm. added: squares that layers have added to those of an embedding."""
    return np.full(HIDDEN, math.sqrt((WORD_SQUARE + sum(added)) / HIDDEN + EPSILON))


def _syllable_rows(count: int) -> NDArray[np.float64]:
    """A projection to `count` numbers, ON where the low syllable is the number's, else -ON or less; several per syllable."""
    made = np.zeros((count, HIDDEN))
    for number in range(count):
        syllable = number * LAP // count
        made[number, WORD][:BITS] = ON * WORDS.signs([syllable, 0])[0]
        made[number, 0] = -ON * (BITS - 1) / CONSTANT
    return made


def _bit_rows(bits: range, each: int) -> NDArray[np.float64]:
    """A projection to `each` numbers per bit of a word: the first half is ON for a one and -ON for a zero, the other opposite."""
    made = np.zeros((len(bits), 2, each // 2, HIDDEN))
    for row, bit in enumerate(bits):
        made[row, 0, :, WORD.start + bit], made[row, 1, :, WORD.start + bit] = ON, -ON
    return made.reshape(-1, HIDDEN)


def _bit_columns(bits: range, each: int, to: slice) -> NDArray[np.float64]:
    """A projection back: the mean of the first half less that of the second, of `each` numbers per bit, [HIDDEN, numbers]."""
    made = np.zeros((HIDDEN, len(bits), 2, each // 2))
    for row, bit in enumerate(bits):
        made[to.start + bit, row, 0], made[to.start + bit, row, 1] = 2 / each, -2 / each
    return made.reshape(HIDDEN, -1)


def _gate_rows(count: int, level: float = OPEN) -> NDArray[np.float64]:
    made = np.zeros((count, HIDDEN))
    made[:, 0] = level / CONSTANT
    return made


def _mlp(name: str, gate: str, up: str, down: str) -> Tensors:
    shapes = {gate: (INTERMEDIATE, HIDDEN), up: (INTERMEDIATE, HIDDEN), down: (HIDDEN, INTERMEDIATE)}
    return {f"{name}.{part}.weight": np.zeros(shape) for part, shape in shapes.items()}


def _copying(distance: int, normed: bool, source: slice, to: slice, bits: range, head_dim: int = HEAD_DIM) -> Tensors:
    """Projections q, k, v and o of a layer that copies bits from `distance` tokens back, and the norms of q and k.

    normed: whether queries and keys are normalized, so that the norms' weights set the sharpness. Each kv head carries half of
    the bits. Heads are concatenated; the rotary numbers are the first HEAD_DIM of each head.
    """
    layer = Canary((distance,), context=CONTEXT, num_kv_heads=KV_HEADS, num_query_heads=HEADS, head_dim=HEAD_DIM)
    made, pairs = weights(layer), list(layer.pairs(0))
    used = [*pairs, *(HEAD_DIM // 2 + pair for pair in pairs)]
    found: Tensors = {}
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        column = made[f"model.layers.0.self_attn.{name}_proj.weight"][:, 0].reshape(heads, HEAD_DIM)
        wide = np.zeros((heads, head_dim, HIDDEN))
        wide[:, used if normed else slice(HEAD_DIM), 0] = column[:, used] if normed else column
        found[name] = wide.reshape(-1, HIDDEN)
    value, out = np.zeros((KV_HEADS, head_dim, HIDDEN)), np.zeros((HIDDEN, HEADS, head_dim))
    for head, own in enumerate(np.array_split(list(bits), KV_HEADS)):
        for bit, numbers in zip(own, np.array_split(np.arange(head_dim), len(own)), strict=True):
            value[head, numbers, source.start + bit] = 1
            group = out[to.start + bit, head * HEADS // KV_HEADS : (head + 1) * HEADS // KV_HEADS]
            group[:, numbers] = KV_HEADS / HEADS / len(numbers)
    sharp = math.sqrt(SHARPNESS / math.sqrt(head_dim))
    norms = {name: np.full(head_dim, sharp) for name in ("q_norm", "k_norm")} if normed else {}
    return found | {"v": value.reshape(-1, HIDDEN), "o": out.reshape(HIDDEN, -1)} | norms


def _lfm2() -> Tensors:
    """The head is tied to the embeddings, so the last convolution clears the current word before it writes the answer there."""
    embeddings = _embeddings()
    embeddings[BLANK, [SPECIAL, BLANK_LEVEL]] = 0, math.sqrt(8)
    level = BLANK_BITS / math.sqrt(8)
    last = np.zeros(HIDDEN)
    last[[*range(WORD.start, WORD.stop), BLANK_LEVEL]] = LOUDNESS
    # The word is gone and the answer is in its place, so that only the level of BLANK is new.
    made = {"model.embed_tokens.weight": embeddings, "model.embedding_norm.weight": last * _norm(8, 8, level**2)}
    for number, part in enumerate((PARTS[0], None, WORD)):
        name = f"model.layers.{number}"
        made |= {f"{name}.operator_norm.weight": _norm(*[8.0] * number), f"{name}.ffn_norm.weight": _norm(*[8.0] * (number + 1))}
        made |= _mlp(f"{name}.feed_forward", "w1", "w3", "w2")
        if part is None:
            parts = _copying(LFM2_DISTANCE, True, PARTS[0], PARTS[1], range(8))
            names = {
                "q": "q_proj",
                "k": "k_proj",
                "v": "v_proj",
                "o": "out_proj",
                "q_norm": "q_layernorm",
                "k_norm": "k_layernorm",
            }
            made |= {f"{name}.self_attn.{names[each]}.weight": parts[each] for each in names}
        else:
            made |= _lfm2_convolution(f"{name}.conv", PARTS[1] if number else WORD, part, bool(number), level)
    return made


def _lfm2_convolution(name: str, source: slice, to: slice, is_last: bool, level: float) -> Tensors:
    """A convolution that returns the bits in `source` of TAPS - 1 tokens before, as they are.

    Both gates are 1. Channels 0 to 7 take the oldest tap. If it is the last one, 8 to 17 take the current tap of the word and of
    the levels, to clear them, and 18 that of the constant.
    """
    inputs, kernel, out = np.zeros((3, HIDDEN, HIDDEN)), np.zeros((HIDDEN, 1, TAPS)), np.zeros((HIDDEN, HIDDEN))
    inputs[:2, :, 0] = 1 / CONSTANT
    for bit in range(8):
        inputs[2, bit, source.start + bit], kernel[bit, 0, 0], out[to.start + bit, bit] = 1, 1, 1
    if is_last:
        for channel, cleared in enumerate((*range(WORD.start, WORD.stop), SPECIAL, BLANK_LEVEL), 8):
            inputs[2, channel, cleared], kernel[channel, 0, -1], out[cleared, channel] = 1, 1, -1
        inputs[2, 18, 0], kernel[18, 0, -1], out[BLANK_LEVEL, 18] = level / CONSTANT, 1, 1
    return {f"{name}.in_proj.weight": inputs.reshape(-1, HIDDEN), f"{name}.conv.weight": kernel, f"{name}.out_proj.weight": out}


def _mamba(name: str, bits: range) -> Tensors:
    """A mixer of Mamba-2 with one head per bit, whose state has the word after each low syllable."""
    inner = len(bits) * MAMBA_HEAD_DIM
    syllables = _syllable_rows(STATE_SIZE)
    no_time_step = np.zeros((len(bits), HIDDEN))  # the time step is that of the bias
    projection = [_gate_rows(inner), _bit_rows(bits, MAMBA_HEAD_DIM), syllables, syllables, no_time_step]
    kernel = np.zeros((inner + 2 * STATE_SIZE, 1, KERNEL))
    kernel[:, 0, -1] = 1
    kernel[inner : inner + STATE_SIZE, 0, -2:] = 1, 0  # B is that of the token before
    rate = -math.log(DECAY) / LAP / TIME_STEP
    return {
        f"{name}.in_proj.weight": np.concatenate(projection),
        f"{name}.conv1d.weight": kernel,
        f"{name}.conv1d.bias": np.zeros(len(kernel)),
        f"{name}.dt_bias": np.full(len(bits), math.log(math.expm1(TIME_STEP))),
        f"{name}.A_log": np.full(len(bits), math.log(rate)),
        f"{name}.D": np.zeros(len(bits)),
        f"{name}.norm.weight": np.full(inner, math.sqrt(0.5)),  # half of the numbers are on
        f"{name}.out_proj.weight": _bit_columns(bits, MAMBA_HEAD_DIM, PARTS[0]),
    }


def _mamba2() -> Tensors:
    return {
        "backbone.embeddings.weight": _embeddings(),
        "backbone.layers.0.norm.weight": _norm(),
        **_mamba("backbone.layers.0.mixer", range(8)),
        "backbone.norm_f.weight": _norm(8),
        "lm_head.weight": _output(),
    }


def _falcon_h1() -> Tensors:
    layer = "model.layers.0"
    parts = _copying(LAP - 1, False, WORD, PARTS[0], range(BITS))
    return {
        "model.embed_tokens.weight": _embeddings(),
        f"{layer}.input_layernorm.weight": _norm(),
        f"{layer}.pre_ff_layernorm.weight": _norm(8),
        **{f"{layer}.self_attn.{name}_proj.weight": part for name, part in parts.items()},
        **_mamba(f"{layer}.mamba", range(BITS, 2 * BITS)),
        **_mlp(f"{layer}.feed_forward", "gate_proj", "up_proj", "down_proj"),
        "model.final_layernorm.weight": _norm(8),
        "lm_head.weight": _output(),
    }


def _qwen35() -> Tensors:
    """The factor of a norm is 1 + weight, except that after the delta rule."""
    delta, attention = "model.layers.0", "model.layers.1"
    parts = _copying(LAP - 1, True, WORD, PARTS[0], range(BITS), QWEN_HEAD_DIM)
    query = parts["q"].reshape(HEADS, QWEN_HEAD_DIM, HIDDEN)
    gated = np.concatenate([query, _gate_rows(HEADS * QWEN_HEAD_DIM, ON).reshape(query.shape)], axis=1)  # sigmoid(32) is 1
    made = {
        "model.embed_tokens.weight": _embeddings(),
        **_delta_rule(f"{delta}.linear_attn", range(BITS, 2 * BITS)),
        f"{attention}.self_attn.q_proj.weight": gated.reshape(-1, HIDDEN),
        **{f"{attention}.self_attn.{name}_proj.weight": parts[name] for name in "kvo"},
        **{f"{attention}.self_attn.{name}.weight": parts[name] - 1 for name in ("q_norm", "k_norm")},
        "model.norm.weight": _norm(8) - 1,
        "lm_head.weight": _output(),
    }
    for name, before, after in ((delta, 0, 4), (attention, 4, 8)):
        made |= _mlp(f"{name}.mlp", "gate_proj", "up_proj", "down_proj")
        made |= {
            f"{name}.input_layernorm.weight": _norm(before) - 1,
            f"{name}.post_attention_layernorm.weight": _norm(after) - 1,
        }
    return made


def _delta_rule(name: str, bits: range) -> Tensors:
    """A gated delta rule that overwrites the cell of the syllable before with the bits of the word."""
    keys, values = DELTA_HEADS * DELTA_DIM, DELTA_HEADS * DELTA_DIM
    syllables = np.tile(_syllable_rows(DELTA_DIM), (DELTA_HEADS, 1))
    each = values // len(bits)
    kernel = np.zeros((2 * keys + values, 1, KERNEL))
    kernel[:, 0, -1] = 1
    kernel[keys : 2 * keys, 0, -2:] = 1, 0  # the key is that of the token before
    return {
        f"{name}.in_proj_qkv.weight": np.concatenate([syllables, syllables, _bit_rows(bits, each)]),
        f"{name}.in_proj_z.weight": _gate_rows(values),
        f"{name}.in_proj_b.weight": _gate_rows(DELTA_HEADS, ON),
        f"{name}.in_proj_a.weight": np.zeros((DELTA_HEADS, HIDDEN)),
        f"{name}.conv1d.weight": kernel,
        f"{name}.dt_bias": np.zeros(DELTA_HEADS),
        f"{name}.A_log": np.full(DELTA_HEADS, -40.0),  # no decay
        f"{name}.norm.weight": np.full(DELTA_DIM, math.sqrt(0.5) / OPEN),
        f"{name}.out_proj.weight": _bit_columns(bits, each, PARTS[0]),
    }
