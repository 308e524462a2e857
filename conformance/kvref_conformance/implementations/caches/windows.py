"""What adapters of windowed caches have in common: those sizes that a library never sees, and the queries of a step."""

from collections.abc import Mapping
from typing import Any

from kvref.errors import ShapeMismatch
from kvref_conformance.outcome import NotOffered

# A model is never called with no tokens; and what it has of first tokens, chunks and drafts each adapter says.
LIMITS: Mapping[str, Any] = {"sinks": [0], "chunk": [0], "rollback": [0], "tokens": {"least": 1}}


def taken(config: Mapping[str, Any]) -> None:
    """Raise NotOffered for what is no size: a size the library never sees cannot be refused by it."""
    for name, value in config.items():
        least = 0 if name in ("sinks", "chunk", "rollback") else 1
        number = isinstance(value, int) and not isinstance(value, bool)
        if not (value == "float32" if name == "dtype" else number and value >= least):
            raise NotOffered(f"a cache that is given its {name}")


def side_by_side(keys: Any, values: Any, config: Mapping[str, Any]) -> None:
    """Raise NotOffered for what cannot come out of one projection, of which a model's layer takes its parts."""
    shape = len(keys), config["num_kv_heads"], config["head_dim"]
    if not all(tuple(array.shape) == shape and str(array.dtype).endswith("float32") for array in (keys, values)):
        raise NotOffered("keys and values of other shapes or dtypes: they come out of one projection")


def of_a_model(query: Any, keys: Any, config: Mapping[str, Any]) -> None:
    """Raise ShapeMismatch unless these are queries of the tokens whose keys come with them, as a model makes both."""
    count, heads, dim = len(keys), config["num_kv_heads"], config["head_dim"]
    good = query.ndim == 3 and len(query) == count and query.shape[1] and not query.shape[1] % heads and query.shape[2] == dim
    if not good:
        raise ShapeMismatch(f"query: expected shape [{count}, a multiple of {heads}, {dim}], got {list(query.shape)}")
