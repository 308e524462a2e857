"""What a family's steps are written with: each operation once, with right arguments, in an order in which each has work to do."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray

Got = dict[str, Any]  # what each operation gave, of those that were not declined
Arguments = Callable[[Got], dict[str, Any]]  # raises KeyError where what it would be given was declined
Steps = dict[str, Arguments]  # by the name of the operation in a request


@dataclass(frozen=True)
class Sizes:
    """Of the object that is asked, or where there is none, of its arguments. format: that an implementation has.

    made: all sizes of the object, by name.
    """

    heads: int
    dim: int
    layers: int
    format: str
    made: Mapping[str, Any] = field(default_factory=dict)


def rows(*shape: int) -> NDArray:
    """float32, counting from 1."""
    return np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)


def of(**args: Any) -> Arguments:
    """These arguments; a function is asked for its one."""
    return lambda got: {name: value(got) if callable(value) else value for name, value in args.items()}


def owned(family: str, steps: Steps) -> Steps:
    """The steps of one kind of object, by their names in a request."""
    return {f"{family}.{name}": arguments for name, arguments in steps.items()}
