"""The weights of the hybrid canaries, by their names in checkpoints of transformers.

The residual stream of all has a constant, the bits of the current word (+1 or -1), a number that gives special tokens,
which have no bits, the same length, and parts in which layers write bits. The squares of all numbers add up to a known sum at
each layer, so that the weight of each RMS norm undoes the norm.

SiLU is a switch: an input of ON passes as ON, one of -ON or less as nearly 0. A bit is therefore stored as two numbers, of which
one is on: the first for a one, the second for a zero. Reading takes the difference. A gate that must be open reads the constant.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvref.canary.dimensions import BLANK, CONSTANT, EPSILON, FIRST_WORD, KEY, LOUDNESS, SHARPNESS, Canary
from kvref.canary.hybrid import (
    BITS,
    BLANK_BITS,
    CODES,
    CONTEXT,
    DECAY,
    LAP,
    LFM2_DISTANCE,
    LOOKUP_WEIGHTS,
    TAPS,
    VALUE_WEIGHTS,
    WORDS,
    lap_before,
    require_hybrid,
)
from kvref.canary.weights import Weights, weights

Tensors = dict[str, NDArray[np.float64]]

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64  # of attention
HIDDEN, INTERMEDIATE = HEADS * HEAD_DIM, 64
QWEN_HEAD_DIM, BAMBA_HEAD_DIM = 4 * HEAD_DIM, 2 * HEAD_DIM  # of which a quarter and a half rotate: HEAD_DIM numbers
EXPERTS = 2  # of qwen3-next, one of which each token selects
LATENT = 64  # numbers of a latent of kimi-linear
MAMBA_HEAD_DIM, STATE_SIZE, KERNEL = 64, 128, 4  # a head per bit; several rows of the state per syllable; taps of the convolution
DELTA_HEADS, DELTA_DIM = 2, 128  # heads of the delta rule, and numbers of its keys and of its values
TIME_STEP = 2.0**-8
ON = 32.0
OPEN = 16.0  # input of a gate: silu(16) is 16, to float32's precision

WORD = slice(1, 9)  # the bits of the current word
SPECIAL, BLANK_LEVEL = 9, 10
PARTS = [slice(start, start + 8) for start in (11, 19, 27)]  # bits that layers write
LAP_BEFORE = slice(35, 39)  # the bits of the high syllable less one, if attention looks words up
WORD_SQUARE = CONSTANT**2 + 8  # sum of the squares of an embedding


def hybrid_weights(architecture: str) -> Weights:
    """Return the weights of a hybrid canary, float32, by name. Raises ConfigError for an unknown architecture."""
    require_hybrid(architecture)
    make: dict[str, Callable[[], Tensors]] = {
        "lfm2": _lfm2, "mamba2": _mamba2, "falcon-h1": _falcon_h1, "qwen3.5": _qwen35, "granite-moe-hybrid": _granite,
        "bamba": _bamba, "nemotron-h": _nemotron_h, "qwen3-next": _qwen3_next, "kimi-linear": _kimi_linear,
    }  # fmt: skip
    return {name: np.ascontiguousarray(array, np.float32) for name, array in make[architecture]().items()}


def _embeddings(with_lap_before: bool = False) -> NDArray[np.float64]:
    made = np.zeros((WORDS.vocabulary, HIDDEN))
    if with_lap_before:
        laps = [WORDS.token([low, lap_before(high)]) for low, high in map(WORDS.digits, range(WORDS.vocabulary))]
        made[:, LAP_BEFORE] = CODES[laps][:, BITS:]
    made[:, 0], made[:, WORD] = CONSTANT, CODES
    made[:, SPECIAL] = math.sqrt(12 if with_lap_before else 8) * (made[:, WORD] == 0).all(axis=1)
    return made


def _output() -> NDArray[np.float64]:
    """The output projection. It reads bits in the first part; the high syllable of a word is one more than that of its row."""
    made = np.zeros((WORDS.vocabulary, HIDDEN))
    for token in range(FIRST_WORD, FIRST_WORD + WORDS.words):
        low, high = WORDS.digits(token)
        made[token, PARTS[0]] = LOUDNESS * CODES[WORDS.token([low, lap_before(high)])]
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

    normed: whether queries and keys are normalized, so that the norms' weights set the sharpness. Heads are concatenated; the
    rotary numbers are the first HEAD_DIM of each head.
    """
    layer = Canary((distance,), context=CONTEXT, num_kv_heads=KV_HEADS, num_query_heads=HEADS, head_dim=HEAD_DIM)
    made, pairs = weights(layer), list(layer.pairs(0))
    used = [*pairs, *(HEAD_DIM // 2 + pair for pair in pairs)]
    found: Tensors = {}
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        column = made[f"model.layers.0.self_attn.{name}_proj.weight"][:, 0].reshape(heads, HEAD_DIM)
        wide = np.zeros((heads, head_dim, HIDDEN))
        wide[:, used if normed else slice(HEAD_DIM), 0] = column[:, used] if normed else column
        if name == "q" and not normed:  # scores are divided by the root of head_dim
            wide *= math.sqrt(head_dim / HEAD_DIM)
        found[name] = wide.reshape(-1, HIDDEN)
    value, out = _carried(source, to, bits, head_dim)
    sharp = math.sqrt(SHARPNESS / math.sqrt(head_dim))
    norms = {name: np.full(head_dim, sharp) for name in ("q_norm", "k_norm")} if normed else {}
    return found | {"v": value, "o": out} | norms


def _carried(source: slice, to: slice, bits: range, head_dim: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The projections v and o of attention that returns bits. Each kv head carries half of them."""
    value, out = np.zeros((KV_HEADS, head_dim, HIDDEN)), np.zeros((HIDDEN, HEADS, head_dim))
    for head, own in enumerate(np.array_split(list(bits), KV_HEADS)):
        for bit, numbers in zip(own, np.array_split(np.arange(head_dim), len(own)), strict=True):
            value[head, numbers, source.start + bit] = 1
            group = out[to.start + bit, head * HEADS // KV_HEADS : (head + 1) * HEADS // KV_HEADS]
            group[:, numbers] = KV_HEADS / HEADS / len(numbers)
    return value.reshape(-1, HIDDEN), out.reshape(HIDDEN, -1)


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


def _mamba(name: str, bits: range, heads_per_bit: int = 1) -> Tensors:
    """A mixer of Mamba-2 whose state has the word after each low syllable."""
    heads = len(bits) * heads_per_bit
    inner, each = heads * MAMBA_HEAD_DIM, heads_per_bit * MAMBA_HEAD_DIM
    syllables = _syllable_rows(STATE_SIZE)
    no_time_step = np.zeros((heads, HIDDEN))  # the time step is that of the bias
    projection = [_gate_rows(inner), _bit_rows(bits, each), syllables, syllables, no_time_step]
    kernel = np.zeros((inner + 2 * STATE_SIZE, 1, KERNEL))
    kernel[:, 0, -1] = 1
    kernel[inner : inner + STATE_SIZE, 0, -2:] = 1, 0  # B is that of the token before
    rate = -math.log(DECAY) / LAP / TIME_STEP
    return {
        f"{name}.in_proj.weight": np.concatenate(projection),
        f"{name}.conv1d.weight": kernel,
        f"{name}.conv1d.bias": np.zeros(len(kernel)),
        f"{name}.dt_bias": np.full(heads, math.log(math.expm1(TIME_STEP))),
        f"{name}.A_log": np.full(heads, math.log(rate)),
        f"{name}.D": np.zeros(heads),
        f"{name}.norm.weight": np.full(inner, math.sqrt(0.5)),  # half of the numbers are on
        f"{name}.out_proj.weight": _bit_columns(bits, each, PARTS[0]),
    }


def _mamba_delay(name: str) -> Tensors:
    """A mixer of Mamba-2, of the size of one for BITS bits, that returns the word before. Its matrix stays zero.

    It writes to the second part. The heads pass the inputs of the convolution on (D is 1).
    """
    made = _mamba(name, range(BITS, 2 * BITS))
    inner = BITS * MAMBA_HEAD_DIM
    each = inner // 8
    projection = np.zeros_like(made[f"{name}.in_proj.weight"])
    projection[:inner], projection[inner : 2 * inner] = _gate_rows(inner), _bit_rows(range(8), each)
    kernel = np.zeros_like(made[f"{name}.conv1d.weight"])
    kernel[:inner, 0, -2] = 1
    return made | {
        f"{name}.in_proj.weight": projection,
        f"{name}.conv1d.weight": kernel,
        f"{name}.D": np.ones(BITS),
        f"{name}.out_proj.weight": _bit_columns(range(8), each, PARTS[1]),
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


def _granite() -> Tensors:
    return _consecutive("post_attention_layernorm", "model.norm", _granite_mlp, HEAD_DIM)


def _bamba() -> Tensors:
    return _consecutive("pre_ff_layernorm", "model.final_layernorm", _llama_mlp("feed_forward"), BAMBA_HEAD_DIM)


def _granite_mlp(layer: str) -> Tensors:
    shapes = {"input_linear": (2 * INTERMEDIATE, HIDDEN), "output_linear": (HIDDEN, INTERMEDIATE)}
    return {f"{layer}.shared_mlp.{part}.weight": np.zeros(shape) for part, shape in shapes.items()}


def _llama_mlp(name: str) -> Callable[[str], Tensors]:
    return lambda layer: _mlp(f"{layer}.{name}", "gate_proj", "up_proj", "down_proj")


def _consecutive(second_norm: str, last_norm: str, mlp: Callable[[str], Tensors], head_dim: int) -> Tensors:
    """A layer with the matrix, and one with attention. second_norm: before the MLP.

    The mixer is twice as wide as the residual stream, because llama.cpp supports no other width.
    """
    matrix, attention = "model.layers.0", "model.layers.1"
    parts = _copying(LAP - 1, False, WORD, PARTS[0], range(BITS), head_dim)
    made = {
        "model.embed_tokens.weight": _embeddings(),
        **_mamba(f"{matrix}.mamba", range(BITS, 2 * BITS), 2),
        **{f"{attention}.self_attn.{name}_proj.weight": part for name, part in parts.items()},
        f"{last_norm}.weight": _norm(8),
        "lm_head.weight": _output(),
    }
    for name, before, after in ((matrix, 0, 4), (attention, 4, 8)):
        made |= mlp(name)
        made |= {f"{name}.input_layernorm.weight": _norm(before), f"{name}.{second_norm}.weight": _norm(after)}
    return made


def _looking_up(factor: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Projections q and k of attention without positions, [HEAD_DIM, HIDDEN]: the word of a lap ago, and the word before.

    Half of the numbers compare the words, four per bit, and the other half score the bits of the value, eight per bit. factor: of
    the query, for a score of ten nats per unit of the weights. All numbers are exact in bfloat16.
    """
    (query, key), half = np.zeros((2, HEAD_DIM, HIDDEN)), HEAD_DIM // 2
    for bit, weight in enumerate(LOOKUP_WEIGHTS):
        numbers = slice(bit * half // 8, (bit + 1) * half // 8)
        query[numbers, WORD.start + bit if bit < BITS else LAP_BEFORE.start + bit - BITS] = factor * weight
        key[numbers, PARTS[1].start + bit] = KEY
    for bit, weight in enumerate(VALUE_WEIGHTS):
        numbers = slice(half + bit * half // BITS, half + (bit + 1) * half // BITS)
        query[numbers, 0] = factor * weight / 2 / CONSTANT
        key[numbers, WORD.start + bit] = KEY
    return query, key


def _nemotron_h() -> Tensors:
    """A layer that returns the word before, attention that looks up by it, the matrix, and an MLP."""
    layer = "backbone.layers"
    query, key = _looking_up(2.5)
    value, out = _carried(WORD, PARTS[0], range(BITS), HEAD_DIM)
    made = {
        "backbone.embeddings.weight": _embeddings(with_lap_before=True),
        **_mamba_delay(f"{layer}.0.mixer"),
        f"{layer}.1.mixer.q_proj.weight": np.tile(query, (HEADS, 1)),
        f"{layer}.1.mixer.k_proj.weight": np.tile(key, (KV_HEADS, 1)),
        f"{layer}.1.mixer.v_proj.weight": value,
        f"{layer}.1.mixer.o_proj.weight": out,
        **_mamba(f"{layer}.2.mixer", range(BITS, 2 * BITS)),
        f"{layer}.3.mixer.up_proj.weight": np.zeros((INTERMEDIATE, HIDDEN)),
        f"{layer}.3.mixer.down_proj.weight": np.zeros((HIDDEN, INTERMEDIATE)),
        "lm_head.weight": _output(),
    }
    *before, last = (_norm(4.0, added) for added in (0.0, 8.0, 12.0, 16.0, 16.0))
    return made | {f"{layer}.{number}.norm.weight": norm for number, norm in enumerate(before)} | {"backbone.norm_f.weight": last}


def _qwen3_next() -> Tensors:
    """The weights of qwen3.5 in other projections: those of each key head together. Experts in place of MLPs."""
    made = {name: tensor for name, tensor in _qwen35().items() if ".mlp." not in name}
    delta = "model.layers.0.linear_attn"
    query, key, value = np.split(made.pop(f"{delta}.in_proj_qkv.weight"), 3)
    heads = [each.reshape(DELTA_HEADS, -1, HIDDEN) for each in (query, key, value, made.pop(f"{delta}.in_proj_z.weight"))]
    made[f"{delta}.in_proj_qkvz.weight"] = np.concatenate(heads, axis=1).reshape(-1, HIDDEN)
    rates = [made.pop(f"{delta}.in_proj_{each}.weight")[:, None] for each in "ba"]
    made[f"{delta}.in_proj_ba.weight"] = np.concatenate(rates, axis=1).reshape(-1, HIDDEN)
    for layer in ("model.layers.0.mlp", "model.layers.1.mlp"):
        for name in (*(f"experts.{number}" for number in range(EXPERTS)), "shared_expert"):
            made |= _mlp(f"{layer}.{name}", "gate_proj", "up_proj", "down_proj")
        made |= {f"{layer}.gate.weight": np.zeros((EXPERTS, HIDDEN)), f"{layer}.shared_expert_gate.weight": np.zeros((1, HIDDEN))}
    return made


def _kimi_linear() -> Tensors:
    """A layer that returns the word before, attention with latents that looks up by it, and the matrix.

    The whole key is in the part that has no latent. The latent has the bits of the low syllable.
    """
    layer, attention = "model.layers", "model.layers.1.self_attn"
    query, key = _looking_up(3.5)  # scores are divided by the root of 2 * HEAD_DIM
    latent, carried, out = np.zeros((LATENT, HIDDEN)), np.zeros((HEADS, 2, HEAD_DIM, LATENT)), np.zeros((HIDDEN, HEADS, HEAD_DIM))
    latent[0, 0] = 1
    for bit in range(BITS):
        latent[1 + bit, WORD.start + bit], carried[:, 1, bit, 1 + bit], out[PARTS[0].start + bit, :, bit] = 1, 1, 1 / HEADS
    made = {
        "model.embed_tokens.weight": _embeddings(with_lap_before=True),
        **_kimi_delta(f"{layer}.0.self_attn", True),
        f"{attention}.q_proj.weight": np.tile(np.concatenate([np.zeros_like(query), query]), (HEADS, 1)),
        f"{attention}.kv_a_proj_with_mqa.weight": np.concatenate([latent, key]),
        f"{attention}.kv_a_layernorm.weight": np.full(LATENT, math.sqrt((CONSTANT**2 + BITS) / LATENT)),
        f"{attention}.kv_b_proj.weight": carried.reshape(-1, LATENT),
        f"{attention}.o_proj.weight": out.reshape(HIDDEN, -1),
        **_kimi_delta(f"{layer}.2.self_attn", False),
        "model.norm.weight": _norm(4, 16),
        "lm_head.weight": _output(),
    }
    for number, (before, after) in enumerate(((0, 8), (8, 12), (12, 16))):
        made |= _mlp(f"{layer}.{number}.mlp", "gate_proj", "up_proj", "down_proj")
        made |= {
            f"{layer}.{number}.input_layernorm.weight": _norm(4, before),
            f"{layer}.{number}.post_attention_layernorm.weight": _norm(4, after),
        }
    return made


def _kimi_delta(name: str, delays: bool) -> Tensors:
    """A delta rule with a decay per channel, here none.

    delays: whether it returns the word before: all keys are the same, so that each write replaces the one before. Otherwise it is
    the matrix, with the word before as the key. It has as many heads as attention, because llama.cpp has one number for both.
    """
    syllables, count = _syllable_rows(DELTA_DIM), HEADS * DELTA_DIM
    bits = range(8) if delays else range(BITS, 2 * BITS)
    each = count // len(bits)
    keys = _gate_rows(count) if delays else np.tile(syllables, (HEADS, 1))
    now, before = np.zeros((2, count, 1, KERNEL))
    now[:, 0, -1] = before[:, 0, -2] = 1
    low_rank = np.zeros((DELTA_DIM, HIDDEN))
    low_rank[0, 0] = 1 / CONSTANT
    gate = np.zeros((count, DELTA_DIM))
    gate[:, 0] = ON  # sigmoid(32) is 1
    return {
        f"{name}.q_proj.weight": keys, f"{name}.k_proj.weight": keys, f"{name}.v_proj.weight": _bit_rows(bits, each),
        f"{name}.q_conv1d.weight": now, f"{name}.k_conv1d.weight": now if delays else before,
        f"{name}.v_conv1d.weight": before if delays else now,
        f"{name}.f_a_proj.weight": np.zeros((DELTA_DIM, HIDDEN)), f"{name}.f_b_proj.weight": np.zeros((count, DELTA_DIM)),
        f"{name}.dt_bias": np.zeros(count), f"{name}.A_log": np.full((1, 1, HEADS, 1), -40.0),  # no decay
        f"{name}.b_proj.weight": _gate_rows(HEADS, ON), f"{name}.g_a_proj.weight": low_rank,
        f"{name}.g_b_proj.weight": gate, f"{name}.o_norm.weight": np.full(DELTA_DIM, math.sqrt(0.5)),
        f"{name}.o_proj.weight": _bit_columns(bits, each, PARTS[1] if delays else PARTS[0]),
    }  # fmt: skip
