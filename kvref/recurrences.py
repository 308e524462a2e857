"""The recurrences of layers without attention: a short convolution, SSD (Mamba-2) and the gated delta rule.

Such a layer keeps a state instead of keys and values. The state does not grow: it consists of the last inputs of a convolution,
and of one matrix per head, to which each token adds the outer product of a key and a value:

    SSD                S_t = d_t S_(t-1) + b_t k_t v_t'
    gated delta rule   S_t = d_t S_(t-1) + b_t k_t (v_t - d_t S_(t-1)' k_t)'

d_t is the decay and b_t the strength of the write. The delta rule first subtracts what the decayed matrix returns for the key, so
that a write of strength 1 replaces the value of a key of length 1. Each rule has two forms: `step_matrix` for one token, and
`chunk_matrix`, which needs matrix products for many tokens and no loop over matrices.

Sources: Dao and Gu, Transformers are SSMs, arXiv:2405.21060 (SSD and its chunks); Yang, Kautz and Hatamizadeh, Gated Delta
Networks, arXiv:2412.06464; Yang et al., Parallelizing Linear Transformers with the Delta Rule, arXiv:2406.06484 (chunks of the
delta rule); the state of the convolution as in github.com/Dao-AILab/causal-conv1d.
"""

from array_api_compat import array_namespace

from kvref.array import Array


def keep_inputs(state: Array, inputs: Array) -> Array:
    """Return the convolution state after n more inputs: the last `num_inputs` of all inputs, oldest first.

    state: [num_inputs, ...]. inputs: [n, ...].
    """
    xp = array_namespace(inputs)
    return xp.concat([state, inputs], axis=0)[inputs.shape[0] :, ...]


def short_convolution(state: Array, inputs: Array, weights: Array) -> Array:
    """Return the outputs of a causal depthwise convolution: [n, ...]. It depends on the past through `state` alone.

    state: [num_inputs, ...], the inputs before the first one. inputs: [n, ...]. weights: [num_inputs + 1, ...], the weight of the
    oldest input first.
    """
    xp = array_namespace(inputs)
    known, n = xp.concat([state, inputs], axis=0), inputs.shape[0]
    outputs = weights[0, ...] * known[:n, ...]
    for tap in range(1, weights.shape[0]):
        outputs = outputs + weights[tap, ...] * known[tap : tap + n, ...]
    return outputs


def step_matrix(matrix: Array, key: Array, value: Array, decay: Array, strength: Array, delta_rule: bool) -> Array:
    """Return the matrices of all heads after one more token: [num_heads, key_dim, value_dim].

    key: [num_heads, key_dim]. value: [num_heads, value_dim]. decay, strength: [num_heads].
    """
    xp = array_namespace(matrix)
    matrix = decay[:, None, None] * matrix
    if delta_rule:
        value = value - apply_matrix(matrix, key[None, ...])[0, ...]
    return matrix + key[:, :, None] * xp.expand_dims(strength[:, None] * value, axis=1)


def chunk_matrix(matrix: Array, keys: Array, values: Array, decays: Array, strengths: Array, delta_rule: bool) -> Array:
    """Return the matrices of all heads after n more tokens, as `step_matrix` would one by one, within rounding.

    keys: [n, num_heads, key_dim]. values: [n, num_heads, value_dim]. decays, strengths: [n, num_heads].

    Let D(i, t) be the product of the decays of the tokens after i up to t. Both rules write some values u:

        S_n = D(-1, n - 1) S_(-1) + sum of D(i, n - 1) k_i u_i'.

    For SSD, u_i = b_i v_i. For the delta rule, inserting this sum for S_(t-1) gives a triangular system, which is solved from the
    first token on:

        u_t = b_t (v_t - D(-1, t) S_(-1)' k_t - sum over i < t of D(i, t) (k_i' k_t) u_i).
    """
    xp = array_namespace(matrix)
    written = list[Array]()  # u of each token, [num_heads, value_dim]
    since = list[Array]()  # D(i, t) for the present t, per token i, [num_heads]
    whole = xp.ones_like(decays[0, ...])  # D(-1, t)
    for t in range(keys.shape[0]):
        whole, since = whole * decays[t, ...], [each * decays[t, ...] for each in since]
        value = values[t, ...]
        if delta_rule:
            value = value - whole[:, None] * apply_matrix(matrix, keys[t : t + 1, ...])[0, ...]
            for i in range(t):
                overlap = since[i] * xp.sum(keys[i, ...] * keys[t, ...], axis=-1)
                value = value - overlap[:, None] * written[i]
        written.append(strengths[t, ...][:, None] * value)
        since.append(xp.ones_like(whole))
    weighted = xp.permute_dims(keys * xp.stack(since)[..., None], (1, 2, 0))  # [num_heads, key_dim, n]
    return whole[:, None, None] * matrix + xp.matmul(weighted, xp.permute_dims(xp.stack(written), (1, 0, 2)))


def apply_matrix(matrix: Array, query: Array) -> Array:
    """Return the read-out q' S of each head: [n, num_heads, value_dim]. query: [n, num_heads, key_dim]."""
    xp = array_namespace(matrix)
    return xp.permute_dims(xp.matmul(xp.permute_dims(query, (1, 0, 2)), matrix), (1, 0, 2))
