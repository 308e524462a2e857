"""The tiers of the tiered cache: queues of tokens, to which newest tokens are added and from which oldest ones are removed."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from kvref.array import Array
from kvref.backend import Backend
from kvref.contents import counter
from kvref.errors import FileDamaged
from kvref.formats import FORMATS, Format
from kvref.slots import TokenStore


class Run:
    """Consecutive tokens `[start, stop)` in one format, in a ring of `capacity` slots: index p is in slot p % capacity."""

    def __init__(self, capacity: int, start: int, store: TokenStore) -> None:
        self.capacity, self.start, self.stop, self.store = capacity, start, start, store

    def said(self) -> list[int | str]:
        """Return the run as JSON values for a file's state (MOVE-01)."""
        return [self.store.format.name, self.capacity, self.start, self.stop]

    def slots(self, start: int, stop: int) -> list[int]:
        """Return the slots of the indices [start, stop)."""
        return [position % self.capacity for position in range(start, stop)]

    def takes(self, capacity: int, format: Format) -> bool:
        """Return whether new tokens of this format can be added to this run, in a tier with this capacity."""
        return self.capacity == capacity and self.store.format is format


class Tier:
    """A queue of tokens, in one or more runs.

    A change of policy can add a run with a new format or capacity, to which new tokens are written. The tokens of older runs stay
    as they are stored until they migrate (TIER-10).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.room = 0  # tokens that stay; during migration a tier has up to one batch more
        self.runs: deque[Run] = deque()

    def __len__(self) -> int:
        return sum(run.stop - run.start for run in self.runs)

    def write(self, keys: Array, values: Array) -> None:
        """Add tokens [n, num_kv_heads, head_dim] as the newest."""
        run = self.runs[-1]
        stop = run.stop + keys.shape[0]
        run.store.write(run.slots(run.stop, stop), keys, values)
        run.stop = stop

    def read(self, start: int, stop: int) -> Iterator[tuple[Array, Array]]:
        """Yield the keys and values of the tokens [start, stop), counted from the oldest, run by run."""
        for run in self.runs:
            first, last = (min(max(run.start + each, run.start), run.stop) for each in (start, stop))
            if first < last:
                yield run.store.read(run.slots(first, last))
            start, stop = (each - (run.stop - run.start) for each in (start, stop))

    def let_go(self, count: int) -> None:
        """Remove the oldest `count` tokens."""
        while count:
            run = self.runs[0]
            taken = min(count, run.stop - run.start)
            run.start += taken
            count -= taken
            if run.start == run.stop and len(self.runs) > 1:
                self.runs.popleft()

    def take_back(self, count: int) -> int:
        """Remove the newest `count` tokens, and return `count`."""
        left = count
        for run in reversed(self.runs):
            taken = min(left, run.stop - run.start)
            run.stop -= taken
            left -= taken
        return count

    def drop_drained(self) -> None:
        """Free the memory of runs without tokens to which no token will be added (TIER-16)."""
        self.runs = deque(run for run in self.runs if run.start < run.stop or (self.room and run is self.runs[-1]))

    @property
    def bytes(self) -> int:
        """Bytes of the codes, scales and zeros of the tokens."""
        return sum((run.stop - run.start) * run.store.token_bytes for run in self.runs)


def check_way(keys: Array, values: Array, stores: Sequence[TokenStore]) -> None:
    """Raise NonFinite if tokens cannot migrate through `stores` in order, each quantizing what the one before reads as (TIER-18).

    A float32 scale per row can store every number that `append` accepts (TIER-13), so that only formats of groups are checked.
    Their scales can have a smaller range. A limit would have to be derived for each format and for each sequence of formats;
    instead the tokens are quantized and dequantized.
    """
    for store in stores if any(store.format.granularity == "group" for store in stores) else ():
        keys, values = store.dequantized(store.quantized(keys, values))


def runs_said(said: Any, most: int, num_kv_heads: int, head_dim: int, backend: Backend) -> Iterator[Run]:
    """Yield the runs of a tier that a file describes, without their tokens. most: the largest capacity. Raises FileDamaged."""
    if not isinstance(said, list) or not all(isinstance(run, list) and len(run) == 4 for run in said):
        raise FileDamaged(f"file: expected the token runs of a tier, got {str(said)[:60]}")
    for name, capacity, first, end in said:
        if not isinstance(name, str) or name not in FORMATS:
            raise FileDamaged(f"file: unknown format {name!r}")
        room, start = counter(capacity, "capacity", most), counter(first, "start")
        if not room:
            raise FileDamaged("file: expected a run capacity of at least 1, got 0")
        run = Run(room, start, TokenStore(backend, FORMATS[name], room, num_kv_heads, head_dim))
        run.stop = counter(end, "stop", start + room)
        counter(run.stop - start, "tokens of a run")
        yield run
