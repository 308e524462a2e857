"""A tiered cache of a check, each call of which the model judges."""

from contextlib import suppress
from itertools import accumulate, pairwise
from typing import Any

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families import all_families
from kvref_conformance.families.tiered.model import Tiered
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import PLAIN_FORMATS
from kvref_conformance.testlib.fixtures import (
    clamp_to_limits,
    construct,
    random_pair,
    round_to_input_dtype,
    supported_formats,
    supports,
)
from kvref_conformance.testlib.session import Session


class TieredFixture(Session):
    """A tiered cache.

    If the limits make its tiers longer than a check requests, random tokens are appended until the requested room is left.
    """

    model: Tiered

    def __init__(self, subject: Subject, **changes: Any) -> None:
        requested = all_families()["tiered"].small | changes
        config = clamp_to_limits(subject, "tiered", **changes)
        longer = max(0, sum(config[name] - requested[name] for name in ("tail_length", "warm_length")))
        config = clamp_to_limits(subject, "tiered", **changes | {"max_tokens": requested["max_tokens"] + longer})
        super().__init__(subject, lambda: construct(subject, "tiered", **config))
        self.config = config
        if longer:
            self.append(longer)

    def __len__(self) -> int:
        return len(self.model.tiers.tokens)

    @property
    def appended(self) -> int:
        """The number of tokens appended so far, which is the position of the next one."""
        return self.model.tiers.appended

    @property
    def room_left(self) -> int:
        """The number of tokens that can be appended before a token migrates."""
        policy = self.model.policy
        newest: int = next(policy[name] for name in ("tail_length", "warm_length", "max_tokens") if policy[name])
        return newest - len(self)

    def random_tokens(self, count: int, factor: float = 1.0) -> tuple[NDArray, NDArray]:
        """Random keys and values, multiplied by a factor."""
        keys, values = random_pair(self.subject, count, self.config["num_kv_heads"], self.config["head_dim"])
        return round_to_input_dtype(self.subject, keys * factor), round_to_input_dtype(self.subject, values * factor)

    def append(self, *counts: int, factor: float = 1.0) -> tuple[NDArray, NDArray]:
        """Appends random tokens in calls of `counts` tokens. Looks after each call, and returns all of them."""
        keys, values = self.random_tokens(sum(counts), factor)
        self.append_parts(keys, values, *counts)
        return keys, values

    def append_parts(self, keys: NDArray, values: NDArray, *counts: int) -> None:
        """Appends these tokens in calls of `counts` tokens. Looks after each call."""
        for stop, count in zip(accumulate(counts), counts, strict=True):
            self.cache.append(keys[stop - count : stop], values[stop - count : stop])
            self.look()

    def look(self, *names: str) -> None:
        """Makes the calls that read lengths and contents, or those with these names, and `tier_of` where one tier ends."""
        super().look(*names)
        tokens = self.model.tiers.tokens
        with suppress(NotOffered), self.subject.quiet_reads():
            for older, newer in pairwise(tokens):
                if older.tier != newer.tier:
                    self.cache.tier_of(older.position)
                    self.cache.tier_of(newer.position)


def need_support(subject: Subject, **policy: Any) -> None:
    """Raises NotOffered if the limits exclude one of these values. The check has no use for other values."""
    for name, value in policy.items():
        if not supports(subject, name, value):
            raise NotOffered(f"{name} {value}, where its limits say {subject.limits.limit('tiered', name)}")


def tail_dtype(subject: Subject, *wanted: str) -> str:
    """The first supported tail dtype of `wanted`, or of all plain dtypes if none is given."""
    return supported_formats(subject, "tail_dtype", *(wanted or PLAIN_FORMATS))[0]


def two_store_formats(subject: Subject) -> tuple[str, str]:
    """Two store formats: q4 and q8, or the supported one twice if only one is supported."""
    first, *_, last = supported_formats(subject, "store_format", "q4", "q8") * 2
    return first, last
