"""What a wrong design is: a patch of kvref on the NumPy backend, the clause that it breaks, and a proof.

A proof is a few calls of kvref's own API, whose results differ from those of the unpatched reference.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import numpy as np
import pytest

import kvref
from kvref import backend
from kvref.errors import KVRefError

NUMPY = backend("numpy")

Plant = Callable[[pytest.MonkeyPatch], None]
Proof = Callable[[], Any]


@dataclass(frozen=True)
class Design:
    """A wrong design. clause: one clause that it breaks; the judge can notice it by another. why: its docstring."""

    name: str
    family: str
    clause: str
    why: str
    plant: Plant
    proof: Proof


DESIGNS: dict[str, Design] = {}


def design(family: str, clause: str, proof: Proof) -> Callable[[Plant], Plant]:
    """Register a function that plants a wrong design as one of DESIGNS."""

    def register(plant: Plant) -> Plant:
        assert plant.__name__ not in DESIGNS, plant.__name__
        DESIGNS[plant.__name__] = Design(plant.__name__, family, clause, plant.__doc__ or "", plant, proof)
        return plant

    return register


def around(patch: pytest.MonkeyPatch, owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace `owner.name` by the decorated function, which receives the original function as its first argument."""
    original = getattr(owner, name)

    def replace(new: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(*arguments: Any, **options: Any) -> Any:
            return new(original, *arguments, **options)

        patch.setattr(owner, name, call)
        return new

    return replace


def observe(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the result of a call as numbers and lists, or the name of the class of its error."""
    try:
        result = call(*arguments, **options)
    except KVRefError as error:
        return type(error).__name__
    except Exception as error:
        return f"not an error of the specification: {type(error).__name__}"
    return plain(result)


def plain(result: Any) -> Any:
    """A result with lists in place of arrays and tuples; a NaN as a word, so that results can be compared."""
    if isinstance(result, list | tuple):
        return [plain(each) for each in result]
    if isinstance(result, np.ndarray | np.generic):
        return plain(result.tolist())
    return "nan" if isinstance(result, float) and result != result else result


def rows(*values: float, heads: int = 1, dim: int = 1) -> Any:
    """Tokens [n, heads, dim] all of whose numbers are the value."""
    return np.repeat(np.array(values, np.float32), heads * dim).reshape(len(values), heads, dim)


def noise(count: int, heads: int = 1, dim: int = 1, seed: int = 0) -> Any:
    """Tokens [count, heads, dim] of random numbers."""
    return np.random.default_rng(seed).normal(size=(count, heads, dim)).astype(np.float32)


def paged(kind: Any = kvref.PagedCache, **changes: Any) -> Any:
    """A paged or prefix cache."""
    sizes = {"num_blocks": 12, "block_size": 2, "num_layers": 1, "num_kv_heads": 1, "head_dim": 1}
    return kind(kvref.PagedConfig(**(sizes | changes)), NUMPY)


def write(cache: Any, sequence: int, start: int, *values: float) -> None:
    """Write tokens, the same in every layer."""
    new = rows(*values, heads=cache.config.num_kv_heads, dim=cache.config.head_dim)
    for layer in range(cache.config.num_layers):
        cache.write(sequence, layer, start, new, new)


def written(cache: Any, *values: float) -> int:
    """A new sequence with these tokens."""
    sequence: int = cache.create()
    write(cache, sequence, 0, *values)
    return sequence


def keys(cache: Any, sequence: int, layer: int = 0) -> Any:
    """The first number of each key of a sequence."""
    return cache.gather(sequence, layer)[0][:, 0, 0]
