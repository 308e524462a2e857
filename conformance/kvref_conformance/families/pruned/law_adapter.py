"""The law adapter of the pruned cache. Nothing is pruned, so that all appended tokens are read."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.testlib.fixtures import different_size, random_pair, random_tokens
from kvref_conformance.testlib.law_adapter import LARGEST_JSON_INTEGER, NEGATIVE, TRUNCATABLE, BadCall, Counter, LawAdapter


class PrunedLawAdapter(LawAdapter):
    family = "pruned"

    @property
    def row(self) -> tuple[int, int]:
        return self.config["num_kv_heads"], self.config["head_dim"]

    def length(self) -> int:
        return int(self.cache.length)

    def scalar_observables(self) -> Iterable[tuple[str, Any]]:
        yield from self.offered_attributes("stored_tokens")
        yield "positions", list(self.cache.positions(0))

    def read_unconverted(self) -> Any:
        return self.cache.as_is("read")

    def wrong_shapes(self) -> list[tuple[NDArray, NDArray]]:
        (heads, dim), count = self.row, self.subject.size("tokens", 2)
        shapes = [(count, different_size(heads), dim), (count, heads, dim + 1), (count, heads, different_size(dim))]
        good, *bad = (random_tokens(self.subject, *shape) for shape in [(count, heads, dim), *shapes])
        pairs = [(each, each) for each in bad] + [(good, each) for each in bad]
        if self.subject.size("tokens", count + 1) > count:
            pairs.append((good, random_tokens(self.subject, count + 1, heads, dim)))
        return [*pairs, (good.reshape(-1), good.reshape(-1)), (good[None], good[None]), (good[..., 0], good[..., 0])]

    def out_of_range_calls(self) -> list[BadCall]:
        calls: list[BadCall] = [("PositionOutOfRange", "truncate", (length,)) for length in (-1, len(self) + 1)]
        calls += [("HeadOutOfRange", "positions", (head,)) for head in (-1, self.row[0])]
        scores = np.zeros((self.row[0], len(self)), np.float32)
        calls += [("PositionOutOfRange", "prune", (scores, keep)) for keep in (0, -1)]
        calls += [("PositionOutOfRange", "prune", (scores, 3, sinks, recent)) for sinks, recent in ((-1, 0), (0, -1), (2, 2))]
        count = self.room() - len(self) + 1
        if self.subject.size("tokens", count) == count:  # in one call: of several, the first would succeed
            over = np.zeros((count, *self.row), np.float32)
            calls.append(("CapacityExceeded", "append", (over, over)))
        return calls

    def other_array_calls(self) -> dict[str, list[tuple[Any, ...]]]:
        heads, dim = self.row
        wrong = [random_tokens(self.subject, 1, heads, dim + 1), random_tokens(self.subject, 1, heads, dim)[0]]
        wrong += [random_tokens(self.subject, 1, heads + 1, dim)] if heads > 1 else []
        scores = random_tokens(self.subject, heads, len(self) + 1, 1)[..., 0]
        bad = [scores, scores[:, :-2], scores[0], np.concatenate([scores, scores])[:, :-1], scores[:, :-1, None]]
        return {"attend": [(query, 1.0) for query in wrong], "prune": [(each, 2) for each in bad]}

    def array_calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        return [("read", ())]

    def sizes_for(self, tokens: int) -> dict[str, Any]:
        return {"max_tokens": tokens}

    def room(self) -> int:
        return int(self.config["max_tokens"])

    def invalid_calls(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        keys, values = random_pair(self.subject, 5)
        scores = np.zeros((self.row[0], 5), np.float32)
        yield from (("append", (keys, values)) for _ in range(3))
        yield from (("prune", (scores, keep)) for keep in (*NEGATIVE, LARGEST_JSON_INTEGER, 0))
        yield from (("truncate", (length,)) for length in (*NEGATIVE, LARGEST_JSON_INTEGER, self.room(), 1))
        yield from (("clear", ()), ("clear", ()), ("append", (keys, values[:4])))

    def truncatable(self, tokens: int = TRUNCATABLE) -> Iterator[LawAdapter]:
        yield self.new_cache(**({"max_tokens": tokens} if tokens > TRUNCATABLE else {}))

    def counters(self, appended: int) -> Iterator[Counter]:
        yield "length", self.cache.length, appended
        for name, number in self.offered_attributes("stored_tokens"):
            yield name, number, self.room()
