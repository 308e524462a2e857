"""`truncate` accepts a length before which blocks of a window were released: the next query sees a window with a hole."""

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
