"""The weights of a canary as a Gemma 3, which has windows in some layers, and norms in places where a Llama has none.

A norm's factor is 1 + weight. The norms of queries, of keys and of attention outputs scale each vector to the length of an
undamaged one. They lengthen a vector that damage has shortened: if the bits of one of n heads are missing, the bits of the others
grow by sqrt(n / (n - 1)), and the logit of the blank has to exceed theirs.

The embeddings are also the output projection. A token's row therefore contains its bits in the last part as well, so small that
they hardly disturb what the last layer writes there. The constant of the blank is a separate number. The last norm, which has a
weight for each number, can therefore make the logits of words smaller than that of the blank.
"""

import math

import numpy as np

from kvref.canary import BLANK, FIRST_WORD, Canary, Weights, weights
from kvref.canary.dimensions import CONSTANT, EPSILON
from kvref.errors import ConfigError
from kvref_conformance.implementation_api import NDArray

FAINT_SHARE = 1 / 64  # size of a bit in the last part of a token's row
BLANK_LOUDNESS = 8.0  # contribution of a bit to a logit


def gemma_weights(canary: Canary) -> Weights:
    """Return float32 weights by their names in Gemma 3. Raises ConfigError if the residual stream is too narrow."""
    hidden, layers = canary.hidden_size, canary.num_layers
    last, blank = list(canary.parts(layers)), canary.parts(layers).stop
    if blank >= hidden:
        raise ConfigError(f"num_query_heads * head_dim: expected at least {blank + 1} for a gemma3, got {hidden}")
    made: dict[str, NDArray] = {**weights(canary)}
    said = slice(FIRST_WORD, FIRST_WORD + canary.words)
    embeddings, says = made["model.embed_tokens.weight"], made.pop("lm_head.weight")
    embeddings[said, last] = FAINT_SHARE * np.sign(says[said, last])
    embeddings[BLANK, [0, blank]] = embeddings[BLANK, [blank, 0]]
    made["model.embed_tokens.weight"] = embeddings / np.float32(math.sqrt(hidden))  # a Gemma multiplies them by it
    for layer in range(layers):
        made |= _layer_weights(canary, f"model.layers.{layer}", made, layer, blank)
    factor = np.zeros(hidden)  # multiplies the logit contribution of each number of the residual stream
    factor[last] = BLANK_LOUDNESS / FAINT_SHARE
    heads = canary.num_kv_heads
    quieter = BLANK_LOUDNESS * canary.bits * (heads + math.sqrt(heads * (heads - 1))) / 2 / CONSTANT**2
    factor[0], factor[blank] = -quieter, quieter
    made["model.norm.weight"] = factor * math.sqrt(hidden) * _norm_factor(canary, layers + 1) - 1
    return {name: array.astype(np.float32) for name, array in made.items()}


def _layer_weights(canary: Canary, name: str, made: dict[str, NDArray], layer: int, blank: int) -> dict[str, NDArray]:
    """Return the weights that a layer has in addition to, or instead of, those of a Llama."""
    hidden, dim = canary.hidden_size, canary.head_dim
    query, key = (made[f"{name}.self_attn.{each}_proj.weight"] for each in "qk")
    for projection in (query, key):
        projection[:, blank] = projection[:, 0]
    given = np.zeros(hidden)  # a token with all bits set
    given[0], given[1:blank] = CONSTANT, 1
    length = {each: np.sqrt(np.mean((one[:dim] @ given) ** 2)) for each, one in {"q": query, "k": key}.items()}
    read = math.sqrt(canary.num_kv_heads * canary.bits / hidden + EPSILON)
    return {
        f"{name}.self_attn.q_norm.weight": np.full(dim, length["q"] - 1),
        f"{name}.self_attn.k_norm.weight": np.full(dim, length["k"] - 1),
        f"{name}.input_layernorm.weight": np.full(hidden, _norm_factor(canary, layer + 1) - 1),
        f"{name}.post_attention_layernorm.weight": np.full(hidden, read - 1),
        f"{name}.pre_feedforward_layernorm.weight": np.zeros(hidden),
        f"{name}.post_feedforward_layernorm.weight": np.zeros(hidden),
    }


def _norm_factor(canary: Canary, parts: int) -> float:
    """Return the factor that undoes the norm of a residual stream with `parts` parts and the faint one."""
    square = CONSTANT**2 + (parts + FAINT_SHARE**2) * canary.num_kv_heads * canary.bits
    return math.sqrt(square / canary.hidden_size + EPSILON)
