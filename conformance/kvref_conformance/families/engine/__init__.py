"""Whole engines, which run a canary model: its generated tokens reveal errors of the cache."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kvref.array import Array
from kvref.canary import BOS, FIRST_WORD
from kvref.canary.hybrid import engine_canary
from kvref.errors import ConfigError
from kvref_conformance.families import Family
from kvref_conformance.testlib.sample_calls import ResultByName, SampleCalls, Sizes, args, on_family

CANARY = ("num_layers", "num_kv_heads", "num_query_heads", "head_dim", "context", "period", "window", "recalls", "recurrent")


def makes_a_canary(config: Mapping[str, Any]) -> bool:
    try:
        engine_canary(**{name: config[name] for name in CANARY})
    except ConfigError:
        return False
    return True


FAMILY = Family(
    name="engine",
    chapter="engines",
    small={
        "num_layers": 2, "num_kv_heads": 2, "num_query_heads": 4, "head_dim": 64, "context": 128, "period": 32, "window": 0,
        "recalls": 0, "recurrent": 0, "cache_tokens": 640,
    },
    speaks_for=("LAW-11", "LAW-12", *(f"ENG-{number:02}" for number in (*range(1, 9), 10, 11))),
    gives={"open": "session", "fork": "session", "load": "session", "save": "saved"},
    several={"sessions": "session"},
    may_be_zero=("window", "recalls", "recurrent"),
    fits=makes_a_canary,
)  # fmt: skip


# Interface of engines: sessions that contain tokens and generate the next ones greedily.

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


class EngineFactory(Protocol):
    """Creates an engine for the canary that kvref.canary.hybrid.engine_canary returns, with `cache_tokens` tokens of cache."""

    def __call__(
        self, *, num_layers: int, num_kv_heads: int, num_query_heads: int, head_dim: int, context: int, period: int, window: int,
        recalls: int, recurrent: int, cache_tokens: int,
    ) -> Engine: ...  # fmt: skip


# One call of each operation.

PROMPT = [BOS, *(FIRST_WORD + word for word in range(50))]


def sample_calls(sizes: Sizes) -> SampleCalls:
    def session(got: ResultByName) -> int:
        number: int = got["engine.open"]
        return number

    return {
        **on_family("engine", {
            "open": args(), "extend": args(session=session, tokens=PROMPT), "length": args(session=session),
            "generate": args(session=session, count=2), "step": args(sessions=lambda got: [session(got)]),
            "sample": args(session=session, n=2, count=2), "cancel": args(session=session, count=2),
            "fork": args(session=session), "save": args(session=session), "load": args(saved=lambda got: got["engine.save"]),
            "truncate": args(session=session, length=50), "remove": args(session=session, start=1, stop=3),
            "close": args(session=session),
        }),
    }  # fmt: skip
