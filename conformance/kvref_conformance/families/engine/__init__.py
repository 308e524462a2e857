"""Whole engines, which run a canary model: its generated tokens reveal errors of the cache."""

from collections.abc import Mapping
from typing import Any

from kvref.canary import sized
from kvref.errors import ConfigError
from kvref_conformance.families import Family

CANARY = ("num_layers", "num_kv_heads", "num_query_heads", "head_dim", "context", "period", "window", "recalls")


def makes_a_canary(config: Mapping[str, Any]) -> bool:
    try:
        sized(**{name: config[name] for name in CANARY})
    except ConfigError:
        return False
    return True


FAMILY = Family(
    name="engine",
    chapter="engines",
    small={
        "num_layers": 2, "num_kv_heads": 2, "num_query_heads": 4, "head_dim": 64, "context": 128, "period": 32, "window": 0,
        "recalls": 0, "cache_tokens": 640,
    },
    speaks_for=("LAW-11", "LAW-12", *(f"ENG-{number:02}" for number in (*range(1, 9), 10, 11))),
    gives={"open": "session", "fork": "session", "load": "session", "save": "saved"},
    several={"sessions": "session"},
    may_be_zero=("window", "recalls"),
    fits=makes_a_canary,
)  # fmt: skip
