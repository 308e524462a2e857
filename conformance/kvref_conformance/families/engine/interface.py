"""Engines: sessions that are told tokens and say what comes next, greedily."""

from collections.abc import Sequence
from typing import Protocol

from kvref.array import Array

_SESSION = "SequenceNotFound"
_ROOM = "CapacityExceeded OutOfBlocks"
# The errors that each operation may have to answer with; what `new` has to refuse is always a ConfigError.
ERRORS: dict[str, str] = {
    "extend": f"{_SESSION} TokenOutOfRange {_ROOM}",
    "generate": f"{_SESSION} PositionOutOfRange {_ROOM}",
    "step": f"{_SESSION} PositionOutOfRange {_ROOM}",
    "length": _SESSION,
    "fork": f"{_SESSION} OutOfBlocks",
    "truncate": f"{_SESSION} PositionOutOfRange",
    "remove": f"{_SESSION} PositionOutOfRange",
    "close": _SESSION,
}


class Engine(Protocol):
    """`generate` says `count` tokens in a session, `step` one in each of several."""

    def open(self) -> int: ...
    def extend(self, session: int, tokens: Sequence[int]) -> None: ...
    def generate(self, session: int, count: int) -> Sequence[int] | Array: ...
    def step(self, sessions: Sequence[int]) -> Sequence[int] | Array: ...
    def length(self, session: int) -> int: ...
    def fork(self, session: int) -> int: ...
    def truncate(self, session: int, length: int) -> None: ...
    def remove(self, session: int, start: int, stop: int) -> None: ...
    def close(self, session: int) -> None: ...


class Factory(Protocol):
    """What makes one, of the canary that kvref.canary.sized makes of these sizes, with a cache for `cache_tokens` tokens."""

    def __call__(
        self, *, num_layers: int, num_kv_heads: int, num_query_heads: int, head_dim: int, context: int, period: int, window: int,
        recalls: int, cache_tokens: int,
    ) -> Engine: ...  # fmt: skip
