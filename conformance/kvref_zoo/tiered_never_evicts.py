"""The cache never evicts a token, but reports at most max_tokens tokens."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.TieredCache):
    _all: Any = ()

    def append(self, keys: Any, values: Any) -> None:
        super().append(keys, values)
        self._all = (*self._all, len(keys))

    def read(self) -> Any:
        keys, values = super().read()
        lost = sum(self._all) - len(keys)
        if lost > 0:
            pad = self._backend.zeros((lost, *keys.shape[1:]), "float32")
            return self._backend.xp.concat([pad, keys]), self._backend.xp.concat([pad, values])
        return keys, values

    def clear(self) -> None:
        super().clear()
        self._all = ()


class Implementation(Right):
    clause = "TIER-05"
    also = (
        "EDIT-01", "EDIT-03", "EDIT-06", "MOVE-01", "MOVE-04", "MOVE-07", "TIER-03", "TIER-06", "TIER-09", "TIER-10",
        "TIER-12", "TIER-14", "TIER-15", "TIER-17",
    )  # fmt: skip
    bug = "rajveer43/VeloxQuant-MLX#274"

    def tiered(self, **config: Any) -> Cache:
        return Cache(kvref.TieredConfig(**config))
