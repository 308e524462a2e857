"""`load` restores keys and values and not the number of evicted tokens before them: later tokens get wrong positions."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.WindowedCache):
    def load(self, data: Any) -> None:
        super().load(data)
        held = self._store.read(self._slots(self._positions()))
        self.clear()
        self.append(*held)


class Implementation(Right):
    clause = "MOVE-01"
    bug = "ml-explore/mlx-swift-lm#443"

    def windowed(self, **config: Any) -> Cache:
        return Cache(kvref.WindowedConfig(**config))
