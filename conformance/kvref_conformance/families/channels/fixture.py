"""A cache of this family together with the tokens that were appended to it."""

from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import bits_of, group_of
from kvref_conformance.oracle.formats.kivi import FORMATS, counts
from kvref_conformance.oracle.formats.kivi import reads as read_as
from kvref_conformance.testlib.assertions import assert_equal, assert_pair, reads
from kvref_conformance.testlib.fixtures import (
    at_least,
    construct,
    formats_of,
    new,
    pair_of_tokens,
    round_to_input_dtype,
    supports,
)

LOUD, QUIET = np.float32(2.0**4), np.float32(2.0**-4)  # factors


class ChannelsFixture:
    """A cache and its tokens. Unless `sizes` contains others, head_dim and residual are multiples of the format's group."""

    def __init__(self, subject: Subject, format: str, residuals: int = 1, **sizes: Any) -> None:
        group = group_of(format)
        residual = subject.size("residual", residuals * group)
        heads = 2 if group == 32 else 1
        least = {"num_kv_heads": heads, "head_dim": group, "residual": residual, "max_tokens": 3 * residual + 16}
        self.subject, self.cache = subject, new(subject, "channels", **least | {"format": format} | sizes)
        self.config, self.group = self.cache.config, group
        self.residual, self.row = self.config["residual"], (self.config["num_kv_heads"], self.config["head_dim"])
        self.keys, self.values = pair_of_tokens(subject, 0, *self.row)

    def __len__(self) -> int:
        return len(self.keys)

    def tokens(self, count: int) -> tuple[NDArray, NDArray]:
        """Returns keys in which one channel in five is loud, and values. Raises NotOffered if there is no room for them."""
        at_least(self.cache, max_tokens=len(self) + count)
        keys, values = pair_of_tokens(self.subject, count, *self.row)
        keys[:, :, ::5] *= LOUD
        return round_to_input_dtype(self.subject, keys), values

    def append(self, count: int, *pieces: int) -> None:
        """Appends `count` tokens, at once or in chunks of these sizes followed by one chunk with the rest."""
        self.give(*self.tokens(count), *pieces)

    def give(self, keys: NDArray, values: NDArray, *pieces: int) -> None:
        for start, stop in zip((0, *np.cumsum(pieces)), (*np.cumsum(pieces), len(keys)), strict=True):
            self.cache.append(keys[start:stop], values[start:stop])
        self.keys, self.values = np.concatenate([self.keys, keys]), np.concatenate([self.values, values])

    def truncate(self, length: int) -> None:
        self.cache.truncate(length)
        self.keys, self.values = self.keys[:length], self.values[:length]

    def holds(self, when: str) -> None:
        """Raises Broken unless the length is that of the appended tokens, and they read as the clauses require."""
        assert_equal(self.cache.length, len(self), f"length {when}")
        want = read_as(self.keys, self.values, self.residual, self.config["format"], self.config["dtype"])
        what = f"{len(self)} {self.config['format']} tokens {when}"
        reads(self.subject, self.cache.read(list(range(len(self)))), want, what)

    def read(self) -> tuple[NDArray, NDArray]:
        keys, values = self.cache.read(list(range(len(self))))
        return keys, values

    def is_still(self, before: tuple[NDArray, NDArray], when: str) -> None:
        """Raises Broken unless the cache has as many tokens as `before`, and they read as they did before."""
        assert_equal(self.cache.length, len(before[0]), f"length {when}")
        assert_pair(self.cache.read(list(range(len(before[0])))), before, f"{len(before[0])} tokens {when}, compared with before")

    def as_if_new(self, when: str) -> None:
        """Raises Broken unless the cache reads as a new cache of the same sizes to which only these tokens are appended."""
        never = construct(self.subject, "channels", **self.config)
        never.append(self.keys, self.values)
        assert_equal(self.cache.length, len(self), f"length {when}")
        want = never.read(list(range(len(self))))
        assert_pair(
            self.read(), want, f"{len(self)} tokens {when}, compared with a cache to which only these tokens were appended"
        )

    def full(self) -> tuple[int, int]:
        """Returns the first position whose key is unquantized, and the first whose value is."""
        return counts(len(self), self.residual)


def some(subject: Subject) -> list[str]:
    """Returns one format per number of bits, chosen at random per check. Formats with large groups have checks of their own."""
    offered = formats_of(subject, "format", *FORMATS)
    small = [name for name in offered if group_of(name) == 32 and supports(subject, "head_dim", 32)] or offered
    found = [[name for name in small if bits_of(name) == bits] for bits in (8, 4, 2)]
    return [str(subject.rng.choice(each)) for each in found if each]


def one(subject: Subject) -> str:
    return some(subject)[-1]
