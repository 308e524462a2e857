"""The weights of a canary, by their names in Llama checkpoints."""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvref.canary.dimensions import BLANK, CONSTANT, EPSILON, FIRST_WORD, KEY, LOUDNESS, SHARPNESS, Canary

Weights = dict[str, NDArray[np.float32]]


@lru_cache(8)
def weights(canary: Canary) -> Weights:
    """Return the weights of a canary, float32, by name. They are cached: do not change them.

    Projections are [out, in], with the heads concatenated. The rotary pairs of a head are numbers i and i + head_dim / 2.
    """
    hidden, vocabulary, size = canary.hidden_size, canary.vocabulary, canary.intermediate_size
    embeddings, says = np.zeros((vocabulary, hidden)), np.zeros((vocabulary, hidden))
    embeddings[:, 0] = CONSTANT
    embeddings[:, canary.parts(0)] = [_part(canary, token) for token in range(vocabulary)]
    for token in range(FIRST_WORD, FIRST_WORD + canary.words):
        says[token, canary.parts(canary.num_layers)] = LOUDNESS * _part(canary, token)
    # A larger logit than that of any word if the bits of half a head or more are missing.
    says[BLANK, 0] = LOUDNESS * canary.bits * (canary.num_kv_heads - 0.5) / CONSTANT
    made = {"model.embed_tokens.weight": embeddings, "lm_head.weight": says}
    for layer in range(canary.num_layers):
        name = f"model.layers.{layer}"
        made |= {f"{name}.self_attn.{each}_proj.weight": matrix for each, matrix in _attention(canary, layer).items()}
        made |= {f"{name}.mlp.{each}_proj.weight": np.zeros((size, hidden)) for each in ("gate", "up")}
        made |= {
            f"{name}.mlp.down_proj.weight": np.zeros((hidden, size)),
            f"{name}.input_layernorm.weight": _norm(canary, layer + 1),
            f"{name}.post_attention_layernorm.weight": _norm(canary, layer + 2),
        }
    made["model.norm.weight"] = _norm(canary, canary.num_layers + 1)
    return {name: array.astype(np.float32) for name, array in made.items()}


def _part(canary: Canary, token: int) -> NDArray[np.float64]:
    """A token's part: per head its bits, and a number that gives special tokens, which have no bits, the same length."""
    signs = canary.signs(canary.digits(token))
    special = math.sqrt(canary.bits) * (signs == 0).all(axis=1, keepdims=True)
    return np.concatenate([signs, special], axis=1).reshape(-1)


def _norm(canary: Canary, parts: int) -> NDArray[np.float64]:
    """The weight of an RMS norm that undoes the norm, if the residual stream has `parts` parts."""
    square = CONSTANT**2 + parts * canary.num_kv_heads * canary.bits
    return np.full(canary.hidden_size, math.sqrt(square / canary.hidden_size + EPSILON))


def _attention(canary: Canary, layer: int) -> dict[str, NDArray[np.float64]]:
    """The four projections of a layer, q, k, v and o."""
    hidden, dim, kv_heads = canary.hidden_size, canary.head_dim, canary.num_kv_heads
    group = canary.num_query_heads // kv_heads
    query, key, value, out = (np.zeros((heads, dim, hidden)) for heads in (kv_heads, kv_heads, kv_heads, kv_heads))
    pairs = canary.pairs(layer)
    loud = SHARPNESS * math.sqrt(dim) / (len(pairs) * KEY)  # so that the best score is SHARPNESS
    newest, copied = canary.parts(layer), canary.parts(layer)
    if canary.looks_up(layer):
        copied = canary.parts(layer - 1)  # the token at the place itself: it follows the recalled one
        slots = [slot for slot in range(len(newest)) if slot % (canary.bits + 1) < canary.bits]
        for pair, slot in zip(pairs, slots * (len(pairs) // len(slots)), strict=True):
            query[:, pair, canary.parts(0)[slot]] = loud
            key[:, pair, newest[slot]] = KEY
    else:
        turned = canary.offsets[layer] * canary.frequencies[list(pairs)]
        query[:, list(pairs), 0] = loud * np.cos(turned) / CONSTANT
        query[:, [dim // 2 + pair for pair in pairs], 0] = -loud * np.sin(turned) / CONSTANT
        key[:, : dim // 2, 0] = KEY / CONSTANT
    for head in range(kv_heads):
        for number, numbers in enumerate([*np.array_split(np.arange(dim - 1), canary.bits), np.array([dim - 1])]):
            slot = head * (canary.bits + 1) + number
            value[head, numbers, copied[slot]] = 1
            out[head, numbers, canary.parts(layer + 1)[slot]] = 1 / (group * len(numbers))
    query, out = (np.repeat(each, group, axis=0) for each in (query, out))
    flat = {name: each.reshape(-1, hidden) for name, each in {"q": query, "k": key, "v": value, "o": out}.items()}
    return flat | {"o": flat["o"].T}
