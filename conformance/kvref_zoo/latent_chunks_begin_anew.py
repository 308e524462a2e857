"""Causal queries are placed at the first positions instead of the last: right for a whole prompt, wrong for its second chunk."""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.LatentCache):
    def attend(self, query: Any, up_keys: Any, up_values: Any, scale: Any = None, causal: bool = False) -> Any:
        held = self.length
        self._length = min(held, len(query)) if causal else held
        try:
            return super().attend(query, up_keys, up_values, scale, causal)
        finally:
            self._length = held


class Implementation(Right):
    clause = "MLA-02"
    bug = "vllm-project/vllm#26042"

    def latent(self, **config: Any) -> Cache:
        return Cache(kvref.LatentConfig(**config))
