"""The law adapter of the family `recurrent`. Each fact that it defines lets more laws run (testlib/law_adapter.py)."""

from collections.abc import Iterable, Iterator
from typing import Any

from kvref_conformance.testlib.fixtures import random_pair
from kvref_conformance.testlib.law_adapter import Counter, LawAdapter


class RecurrentLawAdapter(LawAdapter):
    family = "recurrent"

    def length(self) -> int:
        return int(self.cache.length)

    def scalar_observables(self) -> Iterable[tuple[str, Any]]:
        return ()

    def read_unconverted(self) -> Any:
        return self.cache.as_is("read")

    def sizes_for(self, tokens: int) -> dict[str, Any]:
        return {"max_tokens": tokens}

    def room(self) -> int:
        return int(self.config["max_tokens"])

    def invalid_calls(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        keys, values = random_pair(self.subject, 5)
        yield from (("append", (keys, values)) for _ in range(9))
        yield from (("clear", ()), ("clear", ()), ("append", (keys, values[:4])))

    def counters(self, appended: int) -> Iterator[Counter]:
        yield "length", self.cache.length, self.room()
