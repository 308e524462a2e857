"""Windowed caches that evict early, late, or by overwriting a ring."""

import numpy as np

from .simple_paged import CONFIG, NOT_TRUNCATABLE, POSITION, SHAPE, require_float32, require_range, require_sizes


class Windowed:
    """A dictionary of the newest window + rollback tokens and the sink tokens, by position."""

    def __init__(self, num_kv_heads, head_dim, window, sinks, chunk, rollback, dtype):
        require_sizes(1, num_kv_heads=num_kv_heads, head_dim=head_dim, window=window)
        require_sizes(0, sinks=sinks, chunk=chunk, rollback=rollback)
        if dtype != "float32":
            raise CONFIG(dtype)
        self.row = int(num_kv_heads), int(head_dim)
        self.window, self.sinks, self.chunk, self.rollback = int(window), int(sinks), int(chunk), int(rollback)
        self.clear()

    def clear(self):
        self.length, self.rows = 0, {}

    stored_tokens = property(lambda self: len(self.rows))

    def evict(self):
        for position in [each for each in self.rows if self.sinks <= each < self.length - self.window - self.rollback]:
            del self.rows[position]

    def add(self, keys, values):
        for position, (key, value) in enumerate(zip(keys, values, strict=True), self.length):
            self.rows[position] = np.array(key, np.float32), np.array(value, np.float32)
        self.length += len(keys)

    def append(self, keys, values):
        self.require_rows(keys, values)
        self.add(keys, values)
        self.evict()

    def step(self, query, keys, values, scale=None):
        self.require_rows(keys, values)
        self.require_query(query)
        if len(query) != len(keys):
            raise SHAPE("one query per token")
        first = self.length
        self.add(keys, values)
        outputs = [self.attention(query[n], first + n, scale) for n in range(len(query))]
        self.evict()
        return np.array(outputs, np.float32).reshape(query.shape)

    def attend(self, query, scale=None):
        self.require_query(query)
        if self.length and not set(self.view(self.length - 1)) <= self.rows.keys():
            raise POSITION("a token that this query sees was evicted")
        return np.array([self.attention(each, self.length - 1, scale) for each in query], np.float32).reshape(query.shape)

    def view(self, query):
        first = max(0, query - self.window + 1, query // self.chunk * self.chunk if self.chunk else 0)
        return [*range(min(self.sinks, query + 1, first)), *range(first, query + 1)]

    def attention(self, query, position, scale):
        heads, dim = self.row
        if position < 0:
            return np.zeros(query.shape, np.float32)
        rows = np.array([self.rows[each] for each in self.view(position)], np.float64)
        keys, values = (np.repeat(rows[:, part], len(query) // heads, 1) for part in range(2))
        with np.errstate(all="ignore"):
            scores = np.einsum("hd,nhd->hn", query.astype(np.float64), keys) * (dim**-0.5 if scale is None else scale)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            return np.einsum("hn,nhd->hd", weights / weights.sum(-1, keepdims=True), values)

    def read(self, positions):
        for position in positions:
            require_range(POSITION, position, self.length)
            if position not in self.rows:
                raise POSITION(f"{position} was evicted")
        found = np.array([self.rows[int(each)] for each in positions], np.float32).reshape(len(positions), 2, *self.row)
        return found[:, 0], found[:, 1]

    def truncate(self, length):
        require_range(POSITION, length, self.length + 1)
        needed = set(self.view(length)) - {int(length)}
        if not needed <= self.rows.keys():
            raise NOT_TRUNCATABLE(length)
        self.length = int(length)
        for position in [each for each in self.rows if each >= length]:
            del self.rows[position]

    def require_rows(self, keys, values):
        if keys.ndim != 3 or keys.shape[1:] != self.row or values.shape != keys.shape:
            raise SHAPE(f"{keys.shape}, {values.shape}")
        require_float32(keys, values)

    def require_query(self, query):
        if query.ndim != 3 or query.shape[2] != self.row[1] or query.shape[1] % self.row[0] or not query.shape[1]:
            raise SHAPE(query.shape)
        require_float32(query)


class EvictsBeforeTheNextTokens(Windowed):
    """Tokens are evicted by the next append, so that a call leaves its own tokens besides a full window."""

    def add(self, keys, values):
        if len(keys):
            Windowed.evict(self)
        super().add(keys, values)

    def evict(self):
        pass


class EvictsOutsideTheView(Windowed):
    """Evicts a token as soon as neither `attend` nor a query from `length - rollback` on sees it, chunks included."""

    def evict(self):
        first = max(0, min(self.length - self.rollback, self.length - 1))
        seen = set().union(*(self.view(query) for query in range(first, self.length + 1)))
        for position in self.rows.keys() - seen - set(range(self.sinks)):
            del self.rows[position]


class Ring(Windowed):
    """A ring of window + rollback + 1 slots, one more than needed, with the position of each slot, besides the sink tokens."""

    def clear(self):
        self.length = 0
        self.slots = self.window + self.rollback + 1
        self.positions, self.memory = np.full(self.slots, -1), np.zeros((self.slots, 2, *self.row), np.float32)
        self.sink_rows, self.new = {}, {}

    @property
    def rows(self):
        ring = {int(position): tuple(self.memory[slot]) for slot, position in enumerate(self.positions) if position >= 0}
        return self.sink_rows | ring | self.new

    def add(self, keys, values):
        """Tokens of the call itself are in `new` until all queries have seen them."""
        for position, (key, value) in enumerate(zip(keys, values, strict=True), self.length):
            self.new[position] = np.array(key, np.float32), np.array(value, np.float32)
        self.length += len(keys)

    def evict(self):
        for position, row in self.new.items():
            if position < self.sinks:
                self.sink_rows[position] = row
            else:
                self.positions[position % self.slots], self.memory[position % self.slots] = position, row
        self.new = {}

    def truncate(self, length):
        rows = self.rows
        require_range(POSITION, length, self.length + 1)
        if not set(self.view(length)) - {int(length)} <= rows.keys():
            raise NOT_TRUNCATABLE(length)
        self.length = int(length)
        self.positions[self.positions >= length] = -1
        self.sink_rows = {position: row for position, row in self.sink_rows.items() if position < length}


LIMITS: dict[str, dict[str, object]] = {}
DESIGNS = (Windowed, EvictsBeforeTheNextTokens, EvictsOutsideTheView, Ring)
