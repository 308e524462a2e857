"""The tiers of the tiered cache: queues of tokens, to which newest tokens are added and from which oldest ones are removed."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from kvref.array import Array
from kvref.backend import Backend
from kvref.errors import FileDamaged
from kvref.formats import FORMATS, Format
from kvref.snapshot import counter
from kvref.token_store import TokenStore


class TierSegment:
    """Consecutive tokens `[start, stop)` in one format, in a ring of `capacity` slots: index p is in slot p % capacity."""

    def __init__(self, capacity: int, start: int, store: TokenStore) -> None:
        self.capacity, self.start, self.stop, self.store = capacity, start, start, store

    def to_json(self) -> list[int | str]:
        """Return the segment as JSON values for a file's state (MOVE-01)."""
        return [self.store.format.name, self.capacity, self.start, self.stop]

    def slots(self, start: int, stop: int) -> list[int]:
        """Return the slots of the indices [start, stop)."""
        return [position % self.capacity for position in range(start, stop)]

    def accepts(self, capacity: int, format: Format) -> bool:
        """Return whether new tokens of this format can be added to this segment, in a tier with this capacity."""
        return self.capacity == capacity and self.store.format is format


class Tier:
    """A queue of tokens in one or more segments: new tokens are added to the last segment, and removed from the first.

    A tier owns the memory of its segments. Usually there is one. A change of policy can add a segment with a new format or
    capacity, to which new tokens are written. The tokens of older segments stay as they are stored until they migrate (TIER-10).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.room = 0  # tokens that stay; during migration a tier has up to one batch more
        self.segments: deque[TierSegment] = deque()

    def __len__(self) -> int:
        return sum(segment.stop - segment.start for segment in self.segments)

    def write(self, keys: Array, values: Array) -> None:
        """Add tokens [n, num_kv_heads, head_dim] as the newest."""
        segment = self.segments[-1]
        stop = segment.stop + keys.shape[0]
        segment.store.write(segment.slots(segment.stop, stop), keys, values)
        segment.stop = stop

    def read(self, start: int, stop: int) -> Iterator[tuple[Array, Array]]:
        """Yield the keys and values of the tokens [start, stop), counted from the oldest, segment by segment."""
        for segment in self.segments:
            first, last = (min(max(segment.start + each, segment.start), segment.stop) for each in (start, stop))
            if first < last:
                yield segment.store.read(segment.slots(first, last))
            start, stop = (each - (segment.stop - segment.start) for each in (start, stop))

    def remove_oldest(self, count: int) -> None:
        """Remove the oldest `count` tokens."""
        while count:
            segment = self.segments[0]
            taken = min(count, segment.stop - segment.start)
            segment.start += taken
            count -= taken
            if segment.start == segment.stop and len(self.segments) > 1:
                self.segments.popleft()

    def remove_newest(self, count: int) -> int:
        """Remove the newest `count` tokens, and return `count`."""
        left = count
        for segment in reversed(self.segments):
            taken = min(left, segment.stop - segment.start)
            segment.stop -= taken
            left -= taken
        return count

    def drop_empty(self) -> None:
        """Free the memory of segments without tokens to which no token will be added (TIER-16)."""
        self.segments = deque(
            segment for segment in self.segments if segment.start < segment.stop or (self.room and segment is self.segments[-1])
        )

    @property
    def bytes(self) -> int:
        """Bytes of the codes, scales and zeros of the tokens."""
        return sum((segment.stop - segment.start) * segment.store.token_bytes for segment in self.segments)


def check_migration(keys: Array, values: Array, stores: Sequence[TokenStore]) -> None:
    """Raise NonFinite if tokens cannot migrate through `stores` in order, each quantizing what the one before reads as (TIER-18).

    A float32 scale per row can store every number that `append` accepts (TIER-13), so that only formats of groups are checked.
    Their scales can have a smaller range. A limit would have to be derived for each format and for each sequence of formats;
    instead the tokens are quantized and dequantized.
    """
    for store in stores if any(store.format.granularity == "group" for store in stores) else ():
        keys, values = store.dequantized(store.quantized(keys, values))


def segments_from_json(described: Any, most: int, num_kv_heads: int, head_dim: int, backend: Backend) -> Iterator[TierSegment]:
    """Yield the segments of a tier that a file describes, without tokens. most: the largest capacity. Raises FileDamaged."""
    if not isinstance(described, list) or not all(isinstance(segment, list) and len(segment) == 4 for segment in described):
        raise FileDamaged(f"file: expected the token runs of a tier, got {str(described)[:60]}")
    for name, capacity, first, end in described:
        if not isinstance(name, str) or name not in FORMATS:
            raise FileDamaged(f"file: unknown format {name!r}")
        room, start = counter(capacity, "capacity", most), counter(first, "start")
        if not room:
            raise FileDamaged("file: expected a run capacity of at least 1, got 0")
        segment = TierSegment(room, start, TokenStore(backend, FORMATS[name], room, num_kv_heads, head_dim))
        segment.stop = counter(end, "stop", start + room)
        counter(segment.stop - start, "tokens of a run")
        yield segment
