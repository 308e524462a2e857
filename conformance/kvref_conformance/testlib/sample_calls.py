"""Helpers for the `sample_calls` of the families: one valid call of each operation, in an order in which each has an effect."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvref_conformance.implementation_api import NDArray

ResultByName = dict[str, Any]  # the results so far, by step ("paged.create"); declined operations are absent
Arguments = Callable[
    [ResultByName], dict[str, Any]
]  # computes arguments from earlier results; raises KeyError if a result is absent
SampleCalls = dict[str, Arguments]  # the arguments by operation ("paged.write"), a second call with words after it


@dataclass(frozen=True)
class Sizes:
    """The sizes of the object that is called, or, if it has none, of the arguments.

    format: a supported format. config: all sizes of the object, by name.
    """

    heads: int
    dim: int
    layers: int
    format: str
    config: Mapping[str, Any] = field(default_factory=dict)


def counting_rows(*shape: int) -> NDArray:
    """A float32 array with the numbers 1, 2, 3 and so on."""
    return np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)


def args(**args: Any) -> Arguments:
    """These arguments. A function is called with the earlier results, and returns the argument."""
    return lambda got: {name: value(got) if callable(value) else value for name, value in args.items()}


def on_family(family: str, steps: SampleCalls) -> SampleCalls:
    """The steps of one family, with its name before each operation."""
    return {f"{family}.{name}": arguments for name, arguments in steps.items()}


def operation_of(step: str) -> str:
    """The operation of a step: "transfer.begin" for "transfer.begin again", the second call of it."""
    return step.partition(" ")[0]
