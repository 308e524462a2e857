"""A plain paged cache in NumPy with its own errors. The designs in paged_designs.py replace one part of it each."""

from collections import Counter
from contextlib import contextmanager
from copy import deepcopy

import numpy as np

CONFIG, SEQUENCE, LAYER, POSITION, SHAPE, DTYPE, BLOCKS, NOT_TRUNCATABLE, NON_FINITE = (
    type(name, (Exception,), {})
    for name in (
        "ConfigError", "SequenceNotFound", "LayerOutOfRange", "PositionOutOfRange", "ShapeMismatch", "DtypeMismatch",
        "OutOfBlocks", "NotTruncatable", "NonFinite",
    )
)  # fmt: skip
RELEASED = -1


def require_sizes(least, **sizes):
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < least:
            raise CONFIG(f"{name}: {size!r}")


def require_range(error, value, stop):
    if not 0 <= value < stop:
        raise error(f"{value} is not in [0, {stop})")


def require_float32(*arrays):
    for array in arrays:
        if array.dtype == np.float64:
            raise DTYPE("float64 would be rounded twice")


def rotated(keys, by, frequencies, layout):
    """Keys [n, heads, dim], rotated by a number of positions in float64, by complex multiplication."""
    count, keys = len(frequencies), keys.astype(np.float64)
    first = np.arange(count) * 2 if layout == "pairs" else np.arange(count)
    second = first + (1 if layout == "pairs" else count)
    turned = (keys[..., first] + 1j * keys[..., second]) * np.exp(1j * by * np.array(frequencies))
    keys[..., first], keys[..., second] = turned.real, turned.imag
    return keys


class Paged:
    """tables: sequence -> its entries, each a list of one block per layer. counts: sequence -> its length in each layer."""

    stored = np.float32
    bookkeeping = ("tables", "references", "free")

    def __init__(self, num_blocks, block_size, num_layers, num_kv_heads, head_dim, dtype):
        require_sizes(0, num_blocks=num_blocks)
        require_sizes(1, block_size=block_size, num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim)
        if dtype != np.dtype(self.stored).name:
            raise CONFIG(f"dtype: {dtype}")
        self.total, self.size, self.layers = int(num_blocks), int(block_size), int(num_layers)
        self.row = int(num_kv_heads), int(head_dim)
        self.tables, self.counts, self.references, self.begun = {}, {}, Counter(), 0
        self.free = self.make_free_list()
        self.make_store()

    # The parts that designs replace: the free list, the memory, ids, and the choices of fork and truncate.

    def make_free_list(self):
        return list(range(self.total))

    def allocate(self):
        if not self.free:
            raise BLOCKS("no block is free")
        return self.free.pop()

    def give_back(self, block):
        self.free.append(block)

    @property
    def num_free_blocks(self):
        return len(self.free)

    def make_store(self):
        self.keys, self.values = np.zeros((2, self.total * self.size, *self.row), self.stored)

    def put(self, layer, slots, keys, values):
        self.keys[slots], self.values[slots] = keys, values

    def get(self, layer, slots):
        return self.keys[slots].astype(np.float32), self.values[slots].astype(np.float32)

    def new_id(self):
        self.begun += 1
        return self.begun - 1

    def forked_entries(self, sequence):
        """The entries of the child's table, after the references are counted."""
        entries = [list(entry) for entry in self.tables[sequence]]
        self.references.update(block for entry in entries for block in entry if block != RELEASED)
        return entries

    def kept_entries(self, sequence, length):
        return -(-length // self.size)

    # The operations.

    @property
    def utilization(self):
        return (self.total - self.num_free_blocks) / self.total if self.total else 0.0

    def create(self):
        sequence = self.new_id()
        self.tables[sequence], self.counts[sequence] = [], [0] * self.layers
        return sequence

    def drop(self, sequence):
        self.require(sequence)
        self.unlist(self.tables.pop(sequence))
        del self.counts[sequence]

    def fork(self, sequence):
        self.require(sequence)
        with self.undo():
            entries = self.forked_entries(sequence)
        child = self.create()
        self.tables[child], self.counts[child] = entries, list(self.counts[sequence])
        return child

    def truncate(self, sequence, length):
        self.require(sequence)
        require_range(POSITION, length, min(self.counts[sequence]) + 1)
        if 0 < length < self.first(sequence):
            raise NOT_TRUNCATABLE(f"{length} is released")
        table, kept = self.tables[sequence], int(self.kept_entries(sequence, length) if length else 0)
        self.tables[sequence] = table[:kept]
        self.unlist(table[kept:])
        self.counts[sequence] = [int(length)] * self.layers

    def release_before(self, sequence, position):
        self.require(sequence)
        require_range(POSITION, position, min(self.counts[sequence]) + 1)
        for number in range(position // self.size):
            entry = self.tables[sequence][number]
            self.unlist([entry])
            self.tables[sequence][number] = [RELEASED] * self.layers

    def remove(self, sequence, start, stop, frequencies=None, layout="halves"):
        self.require(sequence)
        require_range(POSITION, stop, min(self.counts[sequence]) + 1)
        require_range(POSITION, start, stop + 1)
        start, stop = int(start), int(stop)
        require_range(POSITION, start - self.first(sequence), stop + 1)
        if frequencies is not None and not (0 < len(frequencies) <= self.row[1] // 2 and np.isfinite(frequencies).all()):
            raise CONFIG(f"frequencies: {frequencies}")
        if start == stop:
            return
        moved = [self.at(sequence, layer, range(stop, n)) for layer, n in enumerate(self.counts[sequence])]
        if frequencies is not None:
            with np.errstate(over="ignore"):
                moved = [(rotated(keys, start - stop, frequencies, layout).astype(self.stored), values) for keys, values in moved]
            if any(np.isinf(keys).any() for keys, _ in moved):
                raise NON_FINITE("a rotated key is too large")
        with self.undo():
            for layer, (keys, _) in enumerate(moved):
                self.prepare(sequence, layer, range(start, start + len(keys)))
        for layer, (keys, values) in enumerate(moved):
            self.put(layer, self.slots(sequence, layer, range(start, start + len(keys))), keys, values)
        self.counts[sequence] = [n - (stop - start) for n in self.counts[sequence]]
        kept = -(-max(self.counts[sequence]) // self.size)
        self.unlist(self.tables[sequence][kept:])
        del self.tables[sequence][kept:]

    def ensure_capacity(self, sequence, num_tokens):
        self.require(sequence)
        if num_tokens < 0:
            raise POSITION(f"{num_tokens} tokens")
        self.enlarge({sequence: int(num_tokens)})

    def write(self, sequence, layer, start, keys, values):
        self.require(sequence, layer)
        if keys.ndim != 3 or keys.shape[1:] != self.row or values.shape != keys.shape:
            raise SHAPE(f"{keys.shape}, {values.shape}")
        require_float32(keys, values)
        require_range(POSITION, start, self.counts[sequence][layer] + 1)
        if start < self.first(sequence):
            raise POSITION(f"{start} is released")
        self.store({(sequence, int(layer)): (int(start), np.arange(len(keys)))}, {int(layer): (keys, values)})

    def append(self, sequences, layer, keys, values):
        self.require_all(sequences, layer)
        self.append_to([int(layer)], sequences, keys[None], values[None])

    def append_step(self, sequences, keys, values):
        self.require_all(sequences)
        self.append_to(range(self.layers), sequences, keys, values)

    def append_to(self, layers, sequences, keys, values):
        shape = (len(layers), len(sequences), *self.row)
        if keys.shape != shape or values.shape != shape:
            raise SHAPE(f"{keys.shape}, {values.shape}")
        require_float32(keys, values)
        lanes = {each: np.array([n for n, other in enumerate(sequences) if other == each]) for each in sequences}
        places = {(each, layer): (self.counts[each][layer], rows) for layer in layers for each, rows in lanes.items()}
        self.store(places, {layer: (keys[n], values[n]) for n, layer in enumerate(layers)})

    def read(self, sequence, layer, positions):
        self.require(sequence, layer)
        for position in positions:
            if not self.first(sequence) <= position < self.counts[sequence][layer]:
                raise POSITION(f"{position}")
        return self.at(sequence, layer, positions)

    def gather(self, sequence, layer):
        self.require(sequence, layer)
        return self.at(sequence, layer, range(self.first(sequence), self.counts[sequence][layer]))

    def gather_batch(self, sequences, layer):
        self.require_all(sequences, layer)
        pairs = [self.gather(each, layer) for each in sequences] + [self.empty()]
        offsets = np.cumsum([0, *(len(keys) for keys, _ in pairs[:-1])])
        return *(np.concatenate(parts) for parts in zip(*pairs, strict=True)), offsets

    def length(self, sequence, layer):
        self.require(sequence, layer)
        return self.counts[sequence][layer]

    def lengths(self, sequences, layer):
        self.require_all(sequences, layer)
        return np.array([self.counts[each][layer] for each in sequences], int)

    def block_table(self, sequence, layer):
        self.require(sequence, layer)
        return [entry[layer] for entry in self.tables[sequence]]

    def block_tables(self, sequences, layer):
        self.require_all(sequences, layer)
        rows = [self.block_table(each, layer) for each in sequences]
        longest = max(map(len, rows), default=0)
        return np.array([[*row, *[-1] * (longest - len(row))] for row in rows], int).reshape(len(rows), longest)

    def slot_mapping(self, sequence, layer, start, count):
        self.require(sequence, layer)
        start, count = int(start), int(count)
        if min(start, count) < 0 or start + count > len(self.tables[sequence]) * self.size or start < self.first(sequence):
            raise POSITION(f"{start}, {count}")
        return self.slots(sequence, layer, range(start, start + count)).tolist()

    def attend(self, sequence, layer, query, scale=None):
        self.require(sequence, layer)
        heads, dim = self.row
        if query.ndim != 3 or query.shape[2] != dim or query.shape[1] % heads or not query.shape[1]:
            raise SHAPE(f"query: {query.shape}")
        require_float32(query)
        keys, values = (np.repeat(part, query.shape[1] // heads, 1).astype(np.float64) for part in self.gather(sequence, layer))
        if not len(keys):
            return np.zeros(query.shape, np.float32)
        scores = np.einsum("qhd,nhd->qhn", query, keys) * (dim**-0.5 if scale is None else scale)
        with np.errstate(all="ignore"):
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            return np.einsum("qhn,nhd->qhd", weights / weights.sum(-1, keepdims=True), values).astype(np.float32)

    # Helpers.

    def require(self, sequence, layer=0):
        if sequence not in self.tables:
            raise SEQUENCE(f"{sequence}")
        require_range(LAYER, layer, self.layers)

    def require_all(self, sequences, layer=0):
        require_range(LAYER, layer, self.layers)
        for sequence in sequences:
            self.require(sequence)

    def first(self, sequence):
        return self.size * sum(entry[0] == RELEASED for entry in self.tables[sequence])

    def empty(self):
        return np.zeros((2, 0, *self.row), np.float32)

    def at(self, sequence, layer, positions):
        return tuple(self.get(int(layer), self.slots(sequence, layer, positions)))

    def slots(self, sequence, layer, positions):
        table = np.array([entry[layer] for entry in self.tables[sequence]], int)
        positions = np.array(positions, int)
        return table[positions // self.size] * self.size + positions % self.size

    @contextmanager
    def undo(self):
        """Restore the bookkeeping if the block raises."""
        before = deepcopy({name: getattr(self, name) for name in self.bookkeeping})
        try:
            yield
        except BLOCKS:
            vars(self).update(before)
            raise

    def store(self, places, rows):
        """places: (sequence, layer) -> its first position, and the rows to write there. rows: layer -> keys, values."""
        with self.undo():
            ends = {}
            for (sequence, layer), (start, which) in places.items():
                self.prepare(sequence, layer, range(start, start + len(which)))
                ends[sequence] = max(ends.get(sequence, 0), start + len(which))
            self.enlarge(ends)
        for (sequence, layer), (start, which) in places.items():
            keys, values = rows[layer]
            end = start + len(which)
            self.put(layer, self.slots(sequence, layer, range(start, end)), np.array(keys)[which], np.array(values)[which])
            self.counts[sequence][layer] = max(end, self.counts[sequence][layer])

    def enlarge(self, num_tokens):
        more = {each: -(-tokens // self.size) - len(self.tables[each]) for each, tokens in num_tokens.items()}
        if self.layers * sum(max(0, count) for count in more.values()) > self.num_free_blocks:
            raise BLOCKS(f"{more} more entries, {self.num_free_blocks} free blocks")
        for sequence, count in more.items():
            for _ in range(count):
                entry = [self.allocate() for _ in range(self.layers)]
                self.references.update(entry)
                self.tables[sequence].append(entry)

    def prepare(self, sequence, layer, positions):
        """Replace the shared blocks at these positions by copies."""
        last = min(len(self.tables[sequence]), -(-positions.stop // self.size))
        for entry in self.tables[sequence][positions.start // self.size : last] if positions else ():
            if self.references[entry[layer]] > 1:
                self.separate(entry, layer)

    def separate(self, entry, layer):
        own, slots = self.allocate(), np.arange(self.size)
        self.put(layer, own * self.size + slots, *self.get(layer, entry[layer] * self.size + slots))
        self.references.update([own])
        self.references[entry[layer]] -= 1
        entry[layer] = own

    def unlist(self, entries):
        for block in [block for entry in entries for block in entry if block != RELEASED]:
            self.references[block] -= 1
            if not self.references[block]:
                del self.references[block]
                self.give_back(block)
