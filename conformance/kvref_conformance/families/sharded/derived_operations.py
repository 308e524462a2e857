"""Derived operations of the sharded cache."""

import numpy as np

from kvref_conformance.calls.derived_operations import DerivedOperation
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.implementation_api import NDArray


def read_from_ranks(cache: ObjectProxy) -> tuple[NDArray, NDArray]:
    """Keys and values assembled from all ranks. Of several copies of a head, the first is used."""
    config = cache.config
    shape = int(cache.length), config["num_kv_heads"], config["head_dim"]
    whole = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    for rank in reversed(range(config["head_ranks"] * config["token_ranks"])):
        for part, share in zip(whole, cache.read_rank(rank), strict=True):
            part[np.ix_(cache.positions(rank), cache.heads(rank))] = share
    return whole


def length_from_positions(cache: ObjectProxy) -> int:
    """Number of tokens in all columns of the first row."""
    return sum(len(cache.positions(rank)) for rank in range(cache.config["token_ranks"]))


DERIVED = (
    DerivedOperation("read", "SHARD-01", ("length", "positions", "heads", "read_rank"), read_from_ranks),
    DerivedOperation("length", "SHARD-02", ("positions",), length_from_positions),
    DerivedOperation("clear", "EDIT-01", ("truncate",), lambda cache: cache.truncate(0)),
)
