"""The law adapter of the latent cache. Its keys are the latents, its values the rope parts, of one head."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from kvref_conformance.families.latent.projections import random_projections, sizes_of
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import PACKED_FORMAT, PLAIN_FORMATS
from kvref_conformance.oracle.formats.mla import TILE, expected_row, row_bytes
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.testlib.fixtures import different_size, one_format_per_kind, random_tokens, supported_formats
from kvref_conformance.testlib.law_adapter import LARGEST_JSON_INTEGER, NEGATIVE, TRUNCATABLE, BadCall, Counter, LawAdapter


class LatentLawAdapter(LawAdapter):
    family = "latent"

    @property
    def widths(self) -> tuple[int, int]:
        return self.config["rank"], self.config["rope_dim"]

    def tokens(self, count: int) -> tuple[NDArray, NDArray]:
        rank, rope_dim = self.widths
        return random_tokens(self.subject, count, 1, rank), random_tokens(self.subject, count, 1, rope_dim)

    def to_cache_layout(self, tokens: NDArray) -> NDArray:
        return tokens[:, 0, :]

    def scaled_format_streams(self) -> Iterator[LawAdapter]:
        for name in one_format_per_kind(self.subject, "dtype"):
            yield self.new_cache(**sizes_of(name))

    def save_unconverted(self) -> Any:
        return self.cache.as_is("save")

    def load(self, data: Any) -> None:
        self.cache.load(data)

    def loading_stream(self) -> LawAdapter:
        return self.new_cache(**self.config | {"max_tokens": self.config["max_tokens"] + 3})

    def length(self) -> int:
        return int(self.cache.length)

    def read(self) -> tuple[NDArray, NDArray]:
        return self._split(np.asarray(self.cache.read())[:, None, :])

    def read_unconverted(self) -> Any:
        return self._split(self.cache.as_is("read"))

    def expected(self, keys: NDArray, values: NDArray) -> tuple[ExpectedReads, ExpectedReads]:
        row = expected_row(keys[:, 0], values[:, 0], self.config["dtype"])
        parts = [self._split(part[:, None, :]) for part in row]
        return ExpectedReads(parts[0][0], parts[1][0]), ExpectedReads(parts[0][1], parts[1][1])

    def _split(self, rows: Any) -> tuple[Any, Any]:
        """Splits rows into latents and rope parts."""
        rank = self.config["rank"]
        return rows[..., :rank], rows[..., rank:]

    def scalar_observables(self) -> Iterable[tuple[str, Any]]:
        yield from self.offered_attributes("num_bytes")

    def wrong_shapes(self) -> list[tuple[NDArray, NDArray]]:
        count = self.subject.size("tokens", 2)
        latent, rope = (self.to_cache_layout(part) for part in self.tokens(count))
        longer = [self.to_cache_layout(part) for part in self.tokens(count + 1)]
        bad = [(self._with_width(latent, latent.shape[1] + more), rope) for more in (1, -1) if latent.shape[1] + more]
        bad += [(latent, self._with_width(rope, rope.shape[1] + more)) for more in (1, -1) if rope.shape[1] + more]
        if self.subject.size("tokens", count + 1) > count:
            bad += [(latent, longer[1]), (longer[0], rope)]
        return [*bad, (latent.reshape(-1), rope.reshape(-1)), (latent[None], rope[None]), (latent, rope[:, None, :])]

    def _with_width(self, rows: NDArray, width: int) -> NDArray:
        return random_tokens(self.subject, len(rows), 1, width)[:, 0, :]

    def out_of_range_calls(self) -> list[BadCall]:
        calls: list[BadCall] = [("PositionOutOfRange", "truncate", (length,)) for length in (-1, len(self) + 1)]
        count = self.room() - len(self) + 1
        if self.subject.size("tokens", count) == count:  # in one call: of several, the first would succeed
            calls.append(("CapacityExceeded", "append", tuple(np.zeros((count, width), np.float32) for width in self.widths)))
        return calls

    def other_array_calls(self) -> dict[str, list[tuple[Any, ...]]]:
        heads = random_projections(self.subject, *self.widths, count=2)
        query, keys, values = heads.query(self.subject, 1), heads.up_keys, heads.up_values
        more = np.concatenate([keys, keys[:1]]), np.concatenate([values, values[:1]])
        wrong = [
            (query[..., 1:], keys, values), (query[0], keys, values), (query, more[0], values), (query, keys, more[1]),
            (query, *more), (query, keys[..., 1:], values), (query, keys, values[..., 1:]), (query, keys[0], values),
        ]  # fmt: skip
        return {"attend": [(*each, 1.0, False) for each in wrong]}

    def array_calls(self) -> list[tuple[str, tuple[Any, ...]]]:
        return [("read", ()), ("records", ())]

    def invalid_calls(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        latent, rope = (self.to_cache_layout(part) for part in self.tokens(5))
        yield from (("append", (latent, rope)) for _ in range(5))
        yield from (("truncate", (length,)) for length in (*NEGATIVE, LARGEST_JSON_INTEGER, self.room(), 1))
        yield from (("clear", ()), ("clear", ()), ("append", (latent, rope[: different_size(5)])), ("truncate", (1,)))

    def truncatable(self, tokens: int = TRUNCATABLE) -> Iterator[LawAdapter]:
        for name in supported_formats(self.subject, "dtype", *PLAIN_FORMATS, PACKED_FORMAT):
            rank = {"rank": 2 * TILE} if name == PACKED_FORMAT else {}
            yield self.new_cache(dtype=name, **rank, **({"max_tokens": tokens} if tokens > TRUNCATABLE else {}))

    def room(self) -> int:
        return int(self.config["max_tokens"])

    def counters(self, appended: int) -> Iterator[Counter]:
        yield "length", self.cache.length, appended
        yield "num_bytes", self.cache.num_bytes, appended * row_bytes(*self.widths, self.config["dtype"])
