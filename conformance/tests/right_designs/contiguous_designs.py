"""Contiguous caches with other buffers."""

import numpy as np

from .simple_paged import CONFIG, POSITION, SHAPE, require_float32, require_range, require_sizes

CAPACITY, ROW = type("CapacityExceeded", (Exception,), {}), type("RowOutOfRange", (Exception,), {})


class Contiguous:
    """Buffers [batch_size, num_kv_heads, capacity, head_dim], which double."""

    def __init__(self, batch_size, num_kv_heads, head_dim, initial_capacity, max_seq_len, dtype):
        require_sizes(1, batch_size=batch_size, num_kv_heads=num_kv_heads, head_dim=head_dim, max_seq_len=max_seq_len)
        require_sizes(0, initial_capacity=initial_capacity)
        if dtype != "float32":
            raise CONFIG(dtype)
        self.batch, self.heads, self.dim, self.most = int(batch_size), int(num_kv_heads), int(head_dim), int(max_seq_len)
        self.capacity, self.seq_len = min(int(initial_capacity), self.most), 0
        self.make_store()

    def make_store(self):
        self.buffers = [np.full((self.batch, self.heads, self.capacity, self.dim), np.nan, np.float32) for _ in "kv"]

    def enlarge(self):
        before, self.buffers = self.buffers, None
        self.make_store()
        for buffer, old in zip(self.buffers, before, strict=True):
            buffer[:, :, : self.seq_len] = old[:, :, : self.seq_len]

    def put(self, start, keys, values):
        for buffer, rows in zip(self.buffers, (keys, values), strict=True):
            buffer[:, :, start : start + rows.shape[2]] = rows

    def get(self):
        return tuple(buffer[:, :, : self.seq_len].copy() for buffer in self.buffers)

    def permute(self, rows):
        if len(rows) != self.batch:
            raise type("NotOffered", (Exception,), {})("a fixed batch size")
        for buffer in self.buffers:
            buffer[:] = buffer[rows]

    def raw(self):
        return tuple(self.buffers)

    def append(self, keys, values):
        shape = (self.batch, self.heads, keys.shape[2] if keys.ndim == 4 else -1, self.dim)
        if keys.shape != shape or values.shape != shape:
            raise SHAPE(f"{keys.shape}, {values.shape}")
        require_float32(keys, values)
        total = self.seq_len + shape[2]
        if total > self.most:
            raise CAPACITY(total)
        if total > self.capacity:
            while self.capacity < total:
                self.capacity = min(self.most, 2 * self.capacity or 1)
            self.enlarge()
        self.put(self.seq_len, np.array(keys, np.float32), np.array(values, np.float32))
        self.seq_len = total

    def append_fused(self, key_values):
        if key_values.ndim != 5 or len(key_values) != 2:
            raise SHAPE(key_values.shape)
        self.append(*key_values)

    def read(self):
        return self.get()

    def advance(self, count):
        if count < 0:
            raise POSITION(count)
        if self.seq_len + int(count) > self.capacity:
            raise CAPACITY(count)
        self.seq_len += int(count)

    def truncate(self, length):
        require_range(POSITION, length, self.seq_len + 1)
        self.seq_len = int(length)

    def reorder(self, rows):
        for row in rows:
            require_range(ROW, row, self.batch)
        self.permute([int(row) for row in rows])

    def reset(self):
        self.seq_len = 0


class TransposedBuffers(Contiguous):
    """Stores [batch, tokens, heads, dim]: `raw` and `read` return transposed views of it."""

    def make_store(self):
        self.buffers = [np.zeros((self.batch, self.capacity, self.heads, self.dim), np.float32).swapaxes(1, 2) for _ in "kv"]

    def get(self):
        return tuple(buffer[:, :, : self.seq_len] for buffer in self.buffers)


class OneBuffer(Contiguous):
    """Keys and values are the two halves of each row of one buffer, whose views `raw` returns."""

    def make_store(self):
        whole = np.zeros((self.batch, self.heads, self.capacity, 2 * self.dim), np.float32)
        self.buffers = [whole[..., : self.dim], whole[..., self.dim :]]


class Backward(Contiguous):
    """Tokens are stored from the end of the memory to its beginning; the buffers have a negative stride."""

    def make_store(self):
        super().make_store()
        self.buffers = [buffer[:, :, ::-1] for buffer in self.buffers]


class ListOfChunks:
    """Keeps the appended arrays, and concatenates them to read. No buffers."""

    advance = raw = None

    def __init__(self, **sizes):
        self._plain, self.chunks = Contiguous(**sizes), []

    seq_len = property(lambda self: sum(keys.shape[2] for keys, _ in self.chunks))

    def append(self, keys, values):
        self._plain.append(keys, values)  # validates, and counts
        self.chunks.append((np.array(keys), np.array(values)))

    def read(self):
        plain = self._plain
        none = np.zeros((plain.batch, plain.heads, 0, plain.dim), np.float32)
        parts = zip((none, none), *self.chunks, strict=True)
        return [np.concatenate(part, 2).astype(np.float32) for part in parts]

    def truncate(self, length):
        self._plain.truncate(length)
        rest, kept = int(length), []
        for keys, values in self.chunks:
            if rest > 0:
                kept.append((keys[:, :, :rest], values[:, :, :rest]))
                rest -= kept[-1][0].shape[2]
        self.chunks = kept

    def reorder(self, rows):
        for row in rows:
            require_range(ROW, row, self._plain.batch)
        if len(rows) != self._plain.batch:
            raise type("NotOffered", (Exception,), {})("a fixed batch size")
        self.chunks = [(keys[list(rows)], values[list(rows)]) for keys, values in self.chunks]

    def reset(self):
        self._plain.reset()
        self.chunks = []


class AnyBatch(Contiguous):
    """`reorder` to another batch size makes new buffers; to the same size it works in the old ones."""

    def permute(self, rows):
        if not rows:
            raise CONFIG("no rows")
        if len(rows) == self.batch:
            super().permute(rows)
        else:
            self.batch, self.buffers = len(rows), [buffer[rows] for buffer in self.buffers]


LIMITS: dict[str, dict[str, object]] = {}
DESIGNS = (Contiguous, TransposedBuffers, OneBuffer, Backward, ListOfChunks, AnyBatch)
