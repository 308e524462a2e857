"""Blocks are found by a hash with easy collisions, and tokens are not compared: a prompt gets the blocks of another one."""

from collections.abc import Iterator, Sequence
from typing import Any

import kvref
from kvref.prefix import Tokens
from kvref_zoo.right import Right


class Cache(kvref.PrefixCache):
    def _keys(self, tokens: Tokens, salt: str, known: Sequence[bytes] = ()) -> Iterator[bytes]:
        size, key = self.config.block_size, known[-1] if known else salt.encode()
        for start in range(len(known) * size, len(tokens) - size + 1, size):
            number = hash((int.from_bytes(key, "little"), *tokens[start : start + size]))
            key = number.to_bytes(8, "little", signed=True)
            yield key


class Implementation(Right):
    clause = "PREFIX-03"
    bug = "openvinotoolkit/openvino.genai#3722"

    def prefix(self, **config: Any) -> Cache:
        return Cache(kvref.PagedConfig(**config))
