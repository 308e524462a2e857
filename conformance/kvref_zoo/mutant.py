"""The decorator that adds a wrong cache to the zoo, and the implementation that offers this cache to the judge."""

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

import kvref
from kvref.canary import sized
from kvref.formats import FORMATS
from kvref_conformance.implementation_api import Level
from kvref_conformance.oracle.formats import ROTATED_FORMATS, STATIC_FORMATS

MOST_FORMATS = tuple(name for name in FORMATS if name not in (*STATIC_FORMATS, *ROTATED_FORMATS))  # few mutants use these two
CONFIGS: dict[str, Any] = {
    "channels": kvref.ChannelConfig,
    "compressed": kvref.CompressedConfig,
    "contiguous": kvref.ContiguousConfig,
    "cross": kvref.CrossConfig,
    "grouped": kvref.GroupedConfig,
    "latent": kvref.LatentConfig,
    "paged": kvref.PagedConfig,
    "prefix": kvref.PagedConfig,
    "quantized": kvref.QuantizedConfig,
    "recurrent": kvref.RecurrentConfig,
    "pruned": kvref.PrunedConfig,
    "ragged": kvref.RaggedConfig,
    "sharded": kvref.ShardedConfig,
    "sparse": kvref.SparseConfig,
    "tiered": kvref.TieredConfig,
    "transfer": kvref.TransferConfig,
    "tree": kvref.TreeConfig,
    "windowed": kvref.WindowedConfig,
}


class NumpyImplementation:
    """An implementation with NumPy arrays and no family."""

    name: str
    version = kvref.__version__
    language = "python"
    level: Level = "exact"
    formats = MOST_FORMATS

    def asarray(self, values: Any) -> Any:
        return np.array(values, dtype=np.float32) if values.dtype.name == "bfloat16" else np.array(values)

    def to_numpy(self, array: Any) -> Any:
        return array


class Mutant(NumpyImplementation):
    """An implementation of one family with a planted bug.

    clause: id of the clause that must find the bug. also: ids of other clauses that the mutant may break too. seen_in: the public
    issue that the bug is modelled on, as owner/repository#number, or "". story: the description of the bug for users. limits: the
    declared limits.
    """

    def __init__(
        self, clause: str, also: str, seen_in: str, formats: tuple[str, ...], made: Any, limits: dict[str, Any] | None = None
    ) -> None:
        self.limits = limits or {}
        self.name = "zoo:" + re.sub(r"\B(?=[A-Z])|_", "-", made.__name__).lower()
        self.clause, self.also, self.seen_in, self.formats = clause, tuple(also.split()), seen_in, formats
        self.story = inspect.cleandoc(made.__doc__)
        family = made.__module__.rpartition(".")[2]
        setattr(self, family, _factory(family, made) if inspect.isclass(made) else made)
        if family == "pooled":
            self.buffers = kvref.BufferPool  # a pooled cache can be created on a pool of buffers


Made = TypeVar("Made")
MUTANTS: dict[str, Mutant] = {}


def mutant(
    clause: str,
    *,
    also: str = "",
    seen_in: str = "",
    formats: tuple[str, ...] = MOST_FORMATS,
    limits: dict[str, Any] | None = None,
) -> Callable[[Made], Made]:
    """Add a class, or a factory function, to the zoo.

    Its module is named after its family. Its name is that of the member: `PagedLeaksABlock` is `zoo:paged-leaks-a-block`. Its
    docstring describes the bug to users. The arguments are those of `Mutant`; also: ids separated by spaces.
    """

    def register(made: Made) -> Made:
        found = Mutant(clause, also, seen_in, formats, made, limits)
        MUTANTS[found.name.removeprefix("zoo:")] = found
        return made

    return register


def _factory(family: str, made: Any) -> Callable[..., Any]:
    """The function that creates an object of a class from the arguments of its family's factory."""
    if family in CONFIGS:
        return lambda **config: made(CONFIGS[family](**config))
    if family == "pooled":
        return lambda pool=None, **config: made(kvref.PooledConfig(**config), pool)
    if family == "engine":
        return lambda cache_tokens, **sizes: made(sized(**sizes), cache_tokens)
    if family in ("elements", "hosted", "rows"):
        return partial(made, kvref.reference)
    return made  # type: ignore[no-any-return]
