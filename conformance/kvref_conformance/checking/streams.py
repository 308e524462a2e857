"""The five caches under one face, for the laws that hold for all: append tokens, read them all, observe everything."""

from collections.abc import Iterable
from copy import copy
from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.setup import batch_major, blocks_of, new
from kvref_conformance.drivers.in_process import Handle, Own, Subject
from kvref_conformance.oracle.rows import Reads, read_as
from kvref_conformance.oracle.tiers import Tiers, given
from kvref_conformance.outcome import NotOffered


class Stream:
    """One cache, or one sequence and layer of it, that tokens [n, heads, dim] are appended to."""

    def __init__(self, subject: Subject, family: str, **config: Any) -> None:
        self.subject, self.family = subject, family
        self.cache: Handle = new(subject, family, **config)
        self.sequence = self.cache.create() if family == "paged" else 0
        self.layer = 0

    def beside(self, sequence: int, layer: int) -> "Stream":
        """Another sequence or layer of the same cache."""
        other = copy(self)
        other.sequence, other.layer = sequence, layer
        return other

    def laid_out(self, tokens: NDArray) -> NDArray:
        """Tokens [n, heads, dim] as the cache takes them."""
        return batch_major(tokens) if self.family == "contiguous" else tokens

    def give(self, keys: NDArray | Own, values: NDArray | Own) -> None:
        """Append arrays that are laid out already, or that the cache is to refuse."""
        if self.family == "paged":
            self.cache.write(self.sequence, self.layer, len(self), keys, values)
        elif self.family == "quantized":
            self.cache.append(self.layer, keys, values)
        else:
            self.cache.append(keys, values)

    def append(self, keys: NDArray, values: NDArray) -> None:
        self.give(self.laid_out(keys), self.laid_out(values))

    def __len__(self) -> int:
        with self.subject.looking():
            return self._length()

    def _length(self) -> int:
        if self.family == "contiguous":
            return int(self.cache.seq_len)
        if self.family in ("paged", "quantized"):
            return int(self.cache.length(*([self.sequence] if self.family == "paged" else []), self.layer))
        return int(self.cache.total_tokens)

    def read(self) -> tuple[NDArray, NDArray]:
        """Keys and values [n, heads, dim]."""
        if self.family == "contiguous":
            keys, values = self.cache.read()
            return keys[0].transpose(1, 0, 2), values[0].transpose(1, 0, 2)
        if self.family == "paged":
            return tuple(self.cache.gather(self.sequence, self.layer))
        if self.family == "quantized":
            return tuple(self.cache.read_tokens(self.layer, list(range(len(self)))))
        return tuple(self.cache.read())

    def forget(self) -> None:
        """Give every token back."""
        if self.family == "paged":
            self.cache.drop(self.sequence)
            self.sequence = self.cache.create()
        else:
            getattr(self.cache, "reset" if self.family == "contiguous" else "clear")()

    def expected(self, keys: NDArray, values: NDArray) -> tuple[Reads, Reads]:
        """What the appended tokens read back as, by the oracle, while none is evicted."""
        if self.family == "quantized":
            return read_as(keys, "int8"), read_as(values, "int8")
        if self.family == "tiered":
            tiers = Tiers(tail_length=4, tail_dtype="float16", warm_length=0, warm_format="q8", store_format="q4", max_tokens=20)
            tiers.append(keys, values)
            return tiers.read()
        return given(keys), given(values)

    def observe(self) -> dict[str, Any]:
        """Everything that can be seen of it."""
        with self.subject.looking():
            seen: dict[str, Any] = {"length": len(self)}
            seen["keys"], seen["values"] = (np.array(part) for part in self.read())
            return seen | dict(self._numbers())

    def _numbers(self) -> Iterable[tuple[str, Any]]:
        if self.family == "contiguous":
            yield from self._attributes("capacity")
        elif self.family == "paged":
            yield from self._attributes("num_free_blocks", "utilization")
            for layer in (0, 1):
                yield f"blocks of layer {layer}", len(blocks_of(self.cache, self.sequence, layer))
                yield f"length of layer {layer}", self.cache.length(self.sequence, layer)
        elif self.family == "quantized":
            yield from self._attributes("memory_bytes")
            yield "length of layer 1", self.cache.length(1)
        else:
            stats = self.cache.stats()
            names = {"tiered": ("tail_tokens", "store_tokens", "tail_bytes", "store_bytes"), "pooled": ("num_blocks", "bytes")}
            for name in names[self.family]:
                yield name, getattr(stats, name)

    def _attributes(self, *names: str) -> Iterable[tuple[str, Any]]:
        for name in names:
            try:
                yield name, getattr(self.cache, name)
            except NotOffered:
                continue
