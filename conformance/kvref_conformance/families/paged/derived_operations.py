"""Derived operations of the paged cache."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from kvref_conformance.calls.derived_operations import DerivedOperation, call_in_order, slice_tokens
from kvref_conformance.calls.messages import error_kinds
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.implementation_api import NDArray

Pair = tuple[NDArray, NDArray]


def require_no_released_block(cache: ObjectProxy, derivation: str) -> None:
    """Raises NotOffered if `release_before` was called: positions that are released count in lengths, but cannot be read."""
    if cache.was_called("release_before"):
        raise NotOffered(f"{derivation} after release_before")


def gather_by_reading(cache: ObjectProxy, sequence: int, layer: int) -> Pair:
    require_no_released_block(cache, "gather (derived from read)")
    found: Pair = cache.read(sequence, layer, list(range(cache.length(sequence, layer))))
    return found


def gather_from_a_batch(cache: ObjectProxy, sequence: int, layer: int) -> Pair:
    keys, values, _ = cache.gather_batch([sequence], layer)
    return keys, values


def read_of_what_is_gathered(cache: ObjectProxy, sequence: int, layer: int, positions: Sequence[int]) -> Pair:
    require_no_released_block(cache, "read (derived from gather)")
    keys, values = cache.gather(sequence, layer)
    if any(not 0 <= position < len(keys) for position in positions):
        raise NotOffered("reads at positions that gather does not return (derived from gather)")
    return keys[list(positions)], values[list(positions)]


def length_of_what_is_gathered(cache: ObjectProxy, sequence: int, layer: int) -> int:
    require_no_released_block(cache, "length (derived from gather)")
    return len(cache.gather(sequence, layer)[0])


def write_at_the_end(cache: ObjectProxy, sequence: int, layer: int, start: int, keys: Any, values: Any) -> None:
    """Appends one token at a time, or an empty batch for 0 tokens. Writes before the end are not possible."""
    shapes = [tuple(getattr(getattr(array, "array", array), "shape", ())) for array in (keys, values)]  # also of an OwnArray
    if start != cache.length(sequence, layer) or shapes[0] != shapes[1] or len(shapes[0]) != 3:
        raise NotOffered("a write before the end, or of another shape than [n, heads, dim] (derived from append)")
    if shapes[0][0] == 0:
        cache.append([], layer, keys, values)
    one = [range(n, n + 1) for n in range(shapes[0][0])]
    call_in_order(
        partial(cache.append, [sequence], layer, slice_tokens(keys, 0, each), slice_tokens(values, 0, each)) for each in one
    )


def append_each(cache: ObjectProxy, sequences: Sequence[int], layer: int, keys: Any, values: Any) -> None:
    if not _pair(keys, values) or len(keys) != len(sequences):
        raise NotOffered("append of other arrays than one token per sequence (derived from write)")

    def one(row: int, sequence: int) -> None:
        cache.write(sequence, layer, cache.length(sequence, layer), keys[row : row + 1], values[row : row + 1])

    call_in_order(partial(one, row, sequence) for row, sequence in enumerate(sequences))


def step_of_one_layer(cache: ObjectProxy, sequences: Sequence[int], layer: int, keys: Any, values: Any) -> None:
    """An append to a cache with one layer is a step."""
    if cache.config["num_layers"] != 1 or layer != 0:
        raise NotOffered("append to one of several layers (derived from append_step)")
    cache.append_step(sequences, keys[None], values[None])


def append_to_each_layer(cache: ObjectProxy, sequences: Sequence[int], keys: Any, values: Any) -> None:
    if not _pair(keys, values) or len(keys) != cache.config["num_layers"]:
        raise NotOffered("append_step of other arrays than one batch per layer (derived from append)")
    call_in_order(partial(cache.append, sequences, layer, keys[layer], values[layer]) for layer in range(len(keys)))


def gather_each(cache: ObjectProxy, sequences: Sequence[int], layer: int) -> tuple[NDArray, NDArray, NDArray]:
    pairs = [cache.gather(sequence, layer) for sequence in sequences]
    if not pairs:
        raise NotOffered("gather_batch of 0 sequences (derived from gather)")
    offsets = np.cumsum([0, *(len(keys) for keys, _ in pairs)])
    return np.concatenate([keys for keys, _ in pairs]), np.concatenate([values for _, values in pairs]), offsets


def block_tables_of_each(cache: ObjectProxy, sequences: Sequence[int], layer: int) -> NDArray:
    tables = [cache.block_table(sequence, layer) for sequence in sequences]
    filled = np.full((len(tables), max(map(len, tables), default=0)), -1)
    for row, table in enumerate(tables):
        filled[row, : len(table)] = table
    return filled


def block_table_of_a_batch(cache: ObjectProxy, sequence: int, layer: int) -> list[int]:
    return [int(block) for block in cache.block_tables([sequence], layer)[0]]


def block_table_of_its_slots(cache: ObjectProxy, sequence: int, layer: int) -> list[int]:
    """Derives the table from the first slot of each block, until slot_mapping raises PositionOutOfRange."""
    require_no_released_block(cache, "block_table (derived from slot_mapping)")
    size, table = cache.config["block_size"], list[int]()
    while len(table) <= cache.config["num_blocks"]:
        try:
            (slot,) = cache.slot_mapping(sequence, layer, len(table) * size, 1)
        except Exception as error:
            if "PositionOutOfRange" not in error_kinds(error):
                raise
            return table
        table.append(slot // size)
    raise ClauseViolation("paged.slot_mapping", "PositionOutOfRange past the last block of the pool", f"slot {slot}", "PAGED-06")


def slots_of_the_table(cache: ObjectProxy, sequence: int, layer: int, start: int, count: int) -> list[int]:
    table, size = cache.block_table(sequence, layer), cache.config["block_size"]
    start, count = int(start), int(count)  # sums of NumPy integers can wrap around
    if start < 0 or count < 0 or start + count > len(table) * size:
        raise NotOffered("slots of positions without a block (derived from block_table)")
    if any(table[p // size] < 0 for p in range(start, start + count)):
        raise NotOffered("slots of released positions (derived from block_table)")
    return [table[p // size] * size + p % size for p in range(start, start + count)]


def free_of_what_is_used(cache: ObjectProxy) -> int:
    total, used = cache.config["num_blocks"], cache.utilization
    return int(total - round(total * used))


def used_of_what_is_free(cache: ObjectProxy) -> float:
    total, free = cache.config["num_blocks"], cache.num_free_blocks
    return (total - free) / total if total else 0.0


def _pair(keys: Any, values: Any) -> bool:
    """Returns whether both are NumPy arrays of the same shape."""
    return isinstance(keys, np.ndarray) and isinstance(values, np.ndarray) and keys.shape == values.shape and keys.ndim > 2


DERIVED = (
    DerivedOperation("gather", "PAGED-12", ("length", "read"), gather_by_reading),
    DerivedOperation("gather", "PAGED-17", ("gather_batch",), gather_from_a_batch),
    DerivedOperation("read", "PAGED-12", ("gather",), read_of_what_is_gathered),
    DerivedOperation("length", "PAGED-17", ("lengths",), lambda cache, sequence, layer: cache.lengths([sequence], layer)[0]),
    DerivedOperation("length", "PAGED-12", ("gather",), length_of_what_is_gathered),
    DerivedOperation("write", "PAGED-16", ("length", "append"), write_at_the_end, splits_appends=True),
    DerivedOperation("append", "PAGED-16", ("length", "write"), append_each),
    DerivedOperation("append", "PAGED-16", ("append_step",), step_of_one_layer),
    DerivedOperation("append_step", "PAGED-16", ("append",), append_to_each_layer),
    DerivedOperation("gather_batch", "PAGED-17", ("gather",), gather_each),
    DerivedOperation(
        "lengths", "PAGED-17", ("length",), lambda cache, sequences, layer: [cache.length(s, layer) for s in sequences]
    ),
    DerivedOperation("block_tables", "PAGED-17", ("block_table",), block_tables_of_each),
    DerivedOperation("block_table", "PAGED-17", ("block_tables",), block_table_of_a_batch),
    DerivedOperation("block_table", "PAGED-06", ("slot_mapping",), block_table_of_its_slots),
    DerivedOperation("slot_mapping", "PAGED-06", ("block_table",), slots_of_the_table),
    DerivedOperation("num_free_blocks", "PAGED-15", ("utilization",), free_of_what_is_used),
    DerivedOperation("utilization", "PAGED-15", ("num_free_blocks",), used_of_what_is_free),
)
