"""The law adapter of the cache with cross-attention. Its tokens are those of a ragged batch; no row has a source."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvref_conformance.families.ragged.law_adapter import RaggedLawAdapter
from kvref_conformance.testlib.fixtures import random_tokens
from kvref_conformance.testlib.law_adapter import BadCall


class CrossLawAdapter(RaggedLawAdapter):
    family = "cross"

    def out_of_range_calls(self) -> list[BadCall]:
        rows, good = self.config["batch_size"], self.to_cache_layout(random_tokens(self.subject, 2))[:1]
        calls = super().out_of_range_calls()
        calls += [
            ("RowOutOfRange", name, (row,)) for name in ("source_length", "read_source", "clear") for row in (-1, rows)
        ]  # fmt: skip
        calls += [("RowOutOfRange", "write_source", ([row], good, good)) for row in (-1, rows)]
        return calls + [("PositionOutOfRange", "write_source", ([0], good, good, [count])) for count in (-1, 3)]

    def other_array_calls(self) -> dict[str, list[tuple[Any, ...]]]:
        good, *wrong = self.rows_of_wrong_shapes()
        every, twice = list(range(len(good))), np.concatenate([good, good])
        return {"write_source": [*((every, each, each) for each in wrong), (every, good, twice), ([0], twice, twice)]}

    def invalid_calls(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        yield from super().invalid_calls()
        yield from (("clear", (self.config["batch_size"],)), ("read_source", (0,)))
