"""Small objects to check: one configuration a family, and rows to put in.

Sizes are small, odd and all different, so that an axis taken for another shows.
"""

from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.drivers.in_process import Handle, Subject

HEADS, DIM = 2, 5

SMALL: dict[str, dict[str, Any]] = {
    "contiguous": {
        "batch_size": 1, "num_kv_heads": HEADS, "head_dim": DIM, "initial_capacity": 3, "max_seq_len": 20, "dtype": "float32",
    },
    "blocks": {"num_blocks": 5},
    "paged": {
        "num_blocks": 24, "block_size": 3, "num_layers": 2, "num_kv_heads": HEADS, "head_dim": DIM, "dtype": "float32",
    },
    "quantized": {"num_layers": 2, "capacity": 20, "num_kv_heads": HEADS, "head_dim": DIM, "format": "int8"},
    "tiered": {
        "num_kv_heads": HEADS, "head_dim": DIM, "max_tokens": 20, "tail_length": 4, "tail_dtype": "float16", "warm_length": 0,
        "warm_format": "q8", "store_format": "q4", "migration_batch": 3,
    },
    "buffers": {"max_buffers": 4},
    "pooled": {"num_kv_heads": HEADS, "head_dim": DIM, "tokens_per_block": 3, "max_tokens": 20},
}  # fmt: skip


def new(subject: Subject, family: str, **changes: Any) -> Handle:
    """A small object of the family. Raises NotOffered, also for a format it does not have."""
    subject.factory(family)  # a family that is missing is said before a format that is
    config = SMALL[family] | changes
    for name in ("dtype", "format", "tail_dtype", "warm_format", "store_format"):
        if isinstance(config.get(name), str):
            subject.formats(config[name])
    return subject.new(family, **config)


def tokens(subject: Subject, count: int, heads: int = HEADS, dim: int = DIM) -> NDArray:
    """float32 [count, heads, dim]: normal rows, each of a magnitude of its own."""
    magnitude = 2.0 ** subject.rng.integers(-4, 5, size=(count, heads, 1))
    return (subject.rng.normal(size=(count, heads, dim)) * magnitude).astype(np.float32)


def pair_of_tokens(subject: Subject, count: int, heads: int = HEADS, dim: int = DIM) -> tuple[NDArray, NDArray]:
    return tokens(subject, count, heads, dim), tokens(subject, count, heads, dim)


def blocks_of(cache: Handle, sequence: int, layer: int) -> list[int]:
    """A block table as plain numbers: an implementation may give an array, ready for a kernel."""
    return [int(block) for block in cache.block_table(sequence, layer)]


def batch_major(rows: NDArray) -> NDArray:
    """[n, heads, dim] -> [1, heads, n, dim], as the contiguous cache takes it."""
    return np.ascontiguousarray(rows.transpose(1, 0, 2)[None])
