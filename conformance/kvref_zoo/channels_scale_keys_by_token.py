"""Keys have their scales along head_dim, as values do.

Channels that are large at every token make the other channels inaccurate.
"""

from typing import Any

import kvref
from kvref_zoo.right import Right


class Cache(kvref.ChannelCache):
    def _by_channel(self, tokens: Any) -> Any:
        return tokens.reshape(-1, self.config.num_kv_heads * self.config.head_dim, self.config.groups.group)

    def _by_token(self, groups: Any) -> Any:
        return groups.reshape(-1, self.config.num_kv_heads, self.config.head_dim)


class Implementation(Right):
    clause = "KIVI-01"
    also = ("KIVI-03", "KIVI-08")

    def channels(self, **config: Any) -> Cache:
        return Cache(kvref.ChannelConfig(**config))
