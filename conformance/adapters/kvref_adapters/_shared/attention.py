"""Helpers of several attention and window adapters.

Helpers of attention adapters: padding for causal masks that count from the first token, and a check of the value width.

Helpers of windowed cache adapters: sizes that a library does not see, and the queries of a step.
"""

from collections.abc import Mapping
from typing import Any

from kvref.errors import ShapeMismatch
from kvref_conformance.exceptions import NotOffered


def padding_rows(query: Any, length: int) -> int:
    """Return the number of zero rows to insert before the queries, for a causal mask that puts query 0 at position 0."""
    if len(query) > length:
        raise NotOffered("more queries than tokens")
    return int(length) - len(query)


def check_value_width(query: Any, keys: Any, values: Any) -> None:
    """Raise NotOffered if values have another width than the keys: the library documents one width for both."""
    if query.shape[-1] == keys.shape[-1] and values.ndim == keys.ndim and values.shape[-1] not in (0, keys.shape[-1]):
        raise NotOffered("values whose width differs from that of the keys")


def check_paired_queries(query: Any, length: int) -> None:
    """Raise NotOffered for more queries than tokens, for kernels whose queries are those of the last tokens."""
    if len(query) > length:
        raise NotOffered("more queries than tokens: each query is that of a token")


def check_matching_shapes(query: Any, keys: Any, values: Any) -> None:
    """Raise NotOffered for shapes that do not match, for kernels that do not check them: one model computes all three."""
    same = query.ndim == keys.ndim == values.ndim == 3 and query.shape[2] == keys.shape[2] and keys.shape[:2] == values.shape[:2]
    if not same or not keys.shape[2] or not values.shape[2] or query.shape[1] % keys.shape[1]:
        raise NotOffered("rejecting shapes that do not match: one model computes queries, keys and values")


def check_equal_shapes(query: Any, keys: Any, values: Any) -> None:
    """Like `check_matching_shapes`, for kernels whose keys and values have one width."""
    check_value_width(query, keys, values)
    check_matching_shapes(query, keys, values)


# A model is never called without tokens. An adapter overrides the limits for sink tokens, chunks and rollback if it has them.
WINDOW_LIMITS: Mapping[str, Any] = {"sinks": [0], "chunk": [0], "rollback": [0], "tokens": {"least": 1}}


def check_sizes(config: Mapping[str, Any]) -> None:
    """Raise NotOffered for an invalid size: the library does not see this size and so cannot reject it."""
    for name, value in config.items():
        least = 0 if name in ("sinks", "chunk", "rollback") else 1
        number = isinstance(value, int) and not isinstance(value, bool)
        if not (value == "float32" if name == "dtype" else number and value >= least):
            raise NotOffered(f"validation of {name}, which the library does not take as an argument")


def check_one_projection(keys: Any, values: Any, config: Mapping[str, Any]) -> None:
    """Raise NotOffered for keys and values that cannot be parts of one projection's output, as a model's layer receives them."""
    shape = len(keys), config["num_kv_heads"], config["head_dim"]
    if not all(tuple(array.shape) == shape and str(array.dtype).endswith("float32") for array in (keys, values)):
        raise NotOffered("rejecting other shapes or dtypes of keys and values: one projection produces both")


def join_heads(tokens: Any, heads: int, dim: int, xp: Any) -> Any:
    """Return tokens [batch, heads, tokens, dim] as [batch, tokens, heads * dim], the form before a projection.

    Arrays of other ranks are returned unchanged. Raises NotOffered for wrong shapes that this conversion would make valid.
    xp: the library's functions `swapaxes` and `reshape`.
    """
    if tokens.ndim != 4:
        if tokens.ndim == 3 and tokens.shape[-1] == heads * dim:
            raise NotOffered("rejecting tokens without a head axis, which the layer accepts")
        return tokens
    batch, its_heads, count, its_dim = tokens.shape
    if its_heads * its_dim == heads * dim and its_heads != heads:
        raise NotOffered("rejecting another split into heads of the same total width")
    return xp.reshape(xp.swapaxes(tokens, 1, 2), (batch, count, its_heads * its_dim))


def check_queries(query: Any, keys: Any, config: Mapping[str, Any]) -> None:
    """Raise ShapeMismatch unless there is one query for each new key, as a model computes both."""
    count, heads, dim = len(keys), config["num_kv_heads"], config["head_dim"]
    good = query.ndim == 3 and len(query) == count and query.shape[1] and not query.shape[1] % heads and query.shape[2] == dim
    if not good:
        raise ShapeMismatch(f"query: expected shape [{count}, a multiple of {heads}, {dim}], got {list(query.shape)}")
