"""JAX's interpreter for Pallas kernels of TPUs, which runs them on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental.pallas import tpu


@contextmanager
def interpreted() -> Iterator[None]:
    """Run kernels in the interpreter, without 64-bit types, which they do not support."""
    with jax.enable_x64(False), tpu.force_tpu_interpret_mode():
        yield
