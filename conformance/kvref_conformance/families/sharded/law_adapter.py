"""Adapter through which the laws use the sharded cache."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.testlib.assertions import random_queries
from kvref_conformance.testlib.fixtures import clamp_to_limits, different_size, random_pair
from kvref_conformance.testlib.law_adapter import (
    LARGEST_JSON_INTEGER,
    NEGATIVE,
    TRUNCATABLE,
    BadCall,
    Counter,
    LawAdapter,
    wrong_queries,
)

CALLS_OF_A_RANK = ("read_rank", "heads", "positions", "block_table", "num_bytes", "lose", "lose_in_append")


GRIDS = ((4, 3), (1, 3), (2, 1), (2, 2), (4, 1), (1, 4), (1, 1))  # rows and columns of ranks; with two heads, 4 rows are copies


def grids(subject: Subject, *wanted: tuple[int, int], **sizes: Any) -> Iterator[dict[str, Any]]:
    """Configurations for each grid (rows, columns), GRIDS by default. Sizes outside the limits are replaced by the nearest
    allowed size. Each configuration occurs once.

    Raises NotOffered if the limits allow no grid.
    """
    tried = list[dict[str, Any]]()
    for rows, columns in wanted or GRIDS:
        try:
            config = clamp_to_limits(subject, "sharded", **{"head_ranks": rows, "token_ranks": columns} | sizes)
        except NotOffered:
            continue
        if config not in tried:
            tried.append(config)
            yield config
    if not tried:
        raise NotOffered("a grid of ranks, within its limits, over which its heads can be divided or copied")


def rows_for(subject: Subject, heads: int) -> int:
    """The requested number of rows, or the next smaller one that the limits allow and that fits this number of heads."""
    wanted = subject.size("head_ranks", 4)
    allowed = (rows for rows in range(wanted, 0, -1) if subject.limits.limit("sharded", "head_ranks").allows(rows))
    return next((rows for rows in allowed if heads % rows == 0 or rows % heads == 0), wanted)


class ShardedLawAdapter(LawAdapter):
    family = "sharded"

    def __init__(self, subject: Subject, **changes: Any) -> None:
        if "num_kv_heads" in changes and "head_ranks" not in changes:
            changes["head_ranks"] = rows_for(subject, subject.size("num_kv_heads", changes["num_kv_heads"]))
        super().__init__(subject, **changes)

    @property
    def ranks(self) -> range:
        return range(self.config["head_ranks"] * self.config["token_ranks"])

    def length(self) -> int:
        return int(self.cache.length)

    def read_unconverted(self) -> Any:
        return self.cache.as_is("read")

    def scalar_observables(self) -> Iterable[tuple[str, Any]]:
        for rank in self.ranks:
            for name in ("positions", "num_bytes"):
                with suppress(NotOffered):
                    yield f"{name} of rank {rank}", getattr(self.cache, name)(rank)

    def out_of_range_calls(self) -> list[BadCall]:
        subject, length = self.subject, len(self)
        calls: list[BadCall] = [("RankOutOfRange", name, (rank,)) for name in CALLS_OF_A_RANK for rank in (-1, len(self.ranks))]
        calls += [("PositionOutOfRange", "truncate", (wrong,)) for wrong in (-1, length + 1)]
        calls += [("PositionOutOfRange", "attend", (random_queries(subject, length + 1), 1.0))]
        if subject.size("tokens", count := self.room() - length + 1) == count:  # only in one call: the first of several would fit
            calls += [("CapacityExceeded", "append", random_pair(subject, count))]
        return calls

    def other_array_calls(self) -> dict[str, list[tuple[Any, ...]]]:
        return {"attend": [(query, 1.0) for query in wrong_queries(self.subject)]}

    def attend_arguments(self) -> tuple[Any, ...]:
        return ()

    def array_calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        calls = [(name, (rank,)) for name in ("read_rank", "heads", "positions", "block_table") for rank in self.ranks]
        return [*calls, ("read", ())]

    def invalid_calls(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        keys, values = random_pair(self.subject, 5)
        yield from (("append", (keys, values)) for _ in range(9))
        yield from (("truncate", (length,)) for length in (*NEGATIVE, LARGEST_JSON_INTEGER, self.room(), 1))
        yield from (("clear", ()), ("clear", ()), ("append", (keys, values[: different_size(5)])), ("append", (keys, values)))
        yield from (
            ("lose", (rank,)) for rank in (*NEGATIVE, LARGEST_JSON_INTEGER, *([self.ranks[-1]] * 2 if self.ranks[-1] else ()))
        )
        yield from (("append", (keys, values)), ("truncate", (1,)), ("clear", ()), ("attend", (np.zeros_like(keys), 1.0)))

    def truncatable(self, tokens: int = TRUNCATABLE) -> Iterator[LawAdapter]:
        for ranks in grids(self.subject, (2, 3), (4, 1), (1, 2)):
            yield self.with_room(tokens, **{name: ranks[name] for name in ("head_ranks", "token_ranks")})

    def sizes_for(self, tokens: int) -> dict[str, Any]:
        size, columns = self.subject.size("block_size", 16), self.subject.size("token_ranks", 3)
        return {"block_size": size, "token_ranks": columns, "num_blocks": -(-tokens // (size * columns))}

    def room(self) -> int:
        return int(self.config["num_blocks"] * self.config["block_size"] * self.config["token_ranks"])

    def counters(self, appended: int) -> Iterator[Counter]:
        yield "length", self.cache.length, self.room()
        config = self.config
        most = 8 * self.room() // config["token_ranks"] * config["num_kv_heads"] * config["head_dim"]
        yield "num_bytes of rank 0", self.cache.num_bytes(0), most
