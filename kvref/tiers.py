"""What the tiered cache is made of: queues of tokens, each written at the new end and let go at the old one."""

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
    """Consecutive tokens in one format: position p lies in slot p % capacity."""

    def __init__(self, capacity: int, start: int, store: TokenStore) -> None:
        self.capacity, self.start, self.stop, self.store = capacity, start, start, store

    def said(self) -> list[int | str]:
        """What a file says of it (MOVE-01)."""
        return [self.store.format.name, self.capacity, self.start, self.stop]

    def slots(self, start: int, stop: int) -> list[int]:
        return [position % self.capacity for position in range(start, stop)]

    def takes(self, capacity: int, format: Format) -> bool:
        """Whether new tokens of this format may go on here, in a tier of so many."""
        return self.capacity == capacity and self.store.format is format


class Tier:
    """A queue of tokens: written at the new end, read and let go at the old end.

    A change of policy opens a new run, and the old one drains: a token is never stored again where it already is (TIER-10).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.room = 0  # tokens it may keep; one batch more lies here while they move on
        self.runs: deque[Run] = deque()

    def __len__(self) -> int:
        return sum(run.stop - run.start for run in self.runs)

    def write(self, keys: Array, values: Array) -> None:
        run = self.runs[-1]
        stop = run.stop + keys.shape[0]
        run.store.write(run.slots(run.stop, stop), keys, values)
        run.stop = stop

    def read(self, start: int, stop: int) -> Iterator[tuple[Array, Array]]:
        """What tokens read as, counted from the oldest one, a run at a time."""
        for run in self.runs:
            first, last = (min(max(run.start + each, run.start), run.stop) for each in (start, stop))
            if first < last:
                yield run.store.read(run.slots(first, last))
            start, stop = (each - (run.stop - run.start) for each in (start, stop))

    def let_go(self, count: int) -> None:
        while count:
            run = self.runs[0]
            taken = min(count, run.stop - run.start)
            run.start += taken
            count -= taken
            if run.start == run.stop and len(self.runs) > 1:
                self.runs.popleft()

    def take_back(self, count: int) -> int:
        """Forget the newest `count` tokens: how many those are."""
        left = count
        for run in reversed(self.runs):
            taken = min(left, run.stop - run.start)
            run.stop -= taken
            left -= taken
        return count

    def drop_drained(self) -> None:
        """Give back the memory of runs that hold no token and take none (TIER-16)."""
        self.runs = deque(run for run in self.runs if run.start < run.stop or (self.room and run is self.runs[-1]))

    @property
    def bytes(self) -> int:
        return sum((run.stop - run.start) * run.store.token_bytes for run in self.runs)


def check_way(keys: Array, values: Array, stores: Sequence[TokenStore]) -> None:
    """Raise NonFinite where tokens cannot go from store to store, each time quantized from what they read as before (TIER-18).

    One float32 scale a row holds whatever is taken at all (TIER-13). Scales of groups may have less range: a largest number would
    have to be derived for each format, and for each behind another, so it is tried.
    """
    for store in stores if any(store.format.granularity == "group" for store in stores) else ():
        keys, values = store.dequantized(store.quantized(keys, values))


def runs_said(said: Any, most: int, num_kv_heads: int, head_dim: int, backend: Backend) -> Iterator[Run]:
    """Runs as a file says that there were some in a tier, with nothing in them. most: their capacity. Raises FileDamaged."""
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
