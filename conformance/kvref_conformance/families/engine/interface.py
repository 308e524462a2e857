"""Interface of engines: sessions that contain tokens and generate the next ones greedily."""

from collections.abc import Sequence
from typing import Protocol

from kvref.array import Array

_SESSION = "SequenceNotFound"
_ROOM = "CapacityExceeded OutOfBlocks"
# The errors that the spec requires of each operation. The only error required of `new` is ConfigError.
ERRORS: dict[str, str] = {
    "extend": f"{_SESSION} TokenOutOfRange {_ROOM}",
    "generate": f"{_SESSION} PositionOutOfRange {_ROOM}",
    "step": f"{_SESSION} PositionOutOfRange {_ROOM}",
    "sample": f"{_SESSION} PositionOutOfRange {_ROOM}",
    "cancel": f"{_SESSION} PositionOutOfRange {_ROOM}",
    "length": _SESSION,
    "fork": f"{_SESSION} OutOfBlocks",
    "load": f"{_SESSION} OutOfBlocks",
    "save": _SESSION,
    "truncate": f"{_SESSION} PositionOutOfRange",
    "remove": f"{_SESSION} PositionOutOfRange",
    "close": _SESSION,
}


class Engine(Protocol):
    """`generate` generates `count` tokens in a session, `step` one token in each of several sessions.

    `sample` returns the tokens of n sequences, each as `generate` would return them, concatenated. `cancel` starts to generate
    and is interrupted; it leaves the session as before. `save` returns the id of a copy outside the cache, from which `load`
    creates sessions.
    """

    def open(self) -> int: ...
    def extend(self, session: int, tokens: Sequence[int]) -> None: ...
    def generate(self, session: int, count: int) -> Sequence[int] | Array: ...
    def step(self, sessions: Sequence[int]) -> Sequence[int] | Array: ...
    def sample(self, session: int, n: int, count: int) -> Sequence[int] | Array: ...
    def cancel(self, session: int, count: int) -> None: ...
    def length(self, session: int) -> int: ...
    def fork(self, session: int) -> int: ...
    def save(self, session: int) -> int: ...
    def load(self, saved: int) -> int: ...
    def truncate(self, session: int, length: int) -> None: ...
    def remove(self, session: int, start: int, stop: int) -> None: ...
    def close(self, session: int) -> None: ...


class Factory(Protocol):
    """Creates an engine for the canary that kvref.canary.sized returns for these sizes, with `cache_tokens` tokens of cache."""

    def __call__(
        self, *, num_layers: int, num_kv_heads: int, num_query_heads: int, head_dim: int, context: int, period: int, window: int,
        recalls: int, cache_tokens: int,
    ) -> Engine: ...  # fmt: skip
