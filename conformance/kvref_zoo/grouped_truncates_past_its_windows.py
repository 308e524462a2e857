"""A draft is taken back further than the windows hold: the next query sees a hole in them."""

from typing import Any

import kvref
from kvref.prefix import Finder
from kvref_zoo.right import Right


class Cache(kvref.GroupedCache):
    truncate = Finder.truncate


class Implementation(Right):
    clause = "GROUP-07"

    def grouped(self, **config: Any) -> Cache:
        return Cache(kvref.GroupedConfig(**config))
