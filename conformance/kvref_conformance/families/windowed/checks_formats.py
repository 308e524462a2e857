"""Checks of WIN-10: windowed caches in any storage format; each token is quantized once."""

from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.attending import exact, normal
from kvref_conformance.checking.expect import equal, raises, reads, shaped, within
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import formats_of, held, new, one_of_each_kind, takes, tokens
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.oracle.attention import seen
from kvref_conformance.oracle.formats import IN_GROUPS, ROTATED, dim_of, group_of
from kvref_conformance.oracle.rows import Reads
from kvref_conformance.oracle.tokens import tokens_as
from kvref_conformance.outcome import NotOffered

LOUD = 2.0**6


class Ring:
    """A cache of one format, and the values that `read` has to return for every token that was appended."""

    def __init__(self, subject: Subject, format: str, **sizes: int) -> None:
        self.subject, self.cache = (
            subject,
            new(subject, "windowed", dtype=format, head_dim=dim_of(format), **{"window": 5} | sizes),
        )
        self.config, self.format = self.cache.config, format
        self.shape = self.config["num_kv_heads"], self.config["head_dim"]
        self.stored = tokens_as(np.zeros((0, *self.shape)), format), tokens_as(np.zeros((0, *self.shape)), format)

    def __len__(self) -> int:
        return len(self.stored[0].values)

    def given(self, count: int, loud: float = 1.0) -> tuple[NDArray, NDArray]:
        """Returns new keys and values, and records them as stored: the caller has to append them next."""
        keys, values = (held(self.subject, tokens(self.subject, count, *self.shape) * loud) for _ in range(2))
        self.stored = joined(self.stored, (tokens_as(keys, self.format), tokens_as(values, self.format)))
        return keys, values

    def append(self, count: int, loud: float = 1.0) -> None:
        self.cache.append(*self.given(self.subject.size("tokens", count), loud))

    def truncate(self, length: int) -> None:
        self.cache.truncate(length)
        self.stored = at(self.stored, slice(length))

    def seen(self, query: int) -> list[int]:
        return [int(each) for each in seen(query, self.config["window"], self.config["sinks"], self.config["chunk"])]

    def holds(self, when: str) -> tuple[NDArray, NDArray]:
        """Reads and returns every position that the next query sees. Raises Broken unless the values are as expected."""
        needed = [position for position in self.seen(len(self)) if position < len(self)]
        got: tuple[NDArray, NDArray] = tuple(self.cache.read(needed))
        reads(self.subject, got, at(self.stored, needed), f"{self.format} tokens {when}", self.format)
        return got


def joined(first: tuple[Reads, Reads], second: tuple[Reads, Reads]) -> tuple[Reads, Reads]:
    keys, values = (Reads(*map(np.concatenate, zip(*parts, strict=True))) for parts in zip(first, second, strict=True))
    return keys, values


def at(stored: tuple[Reads, Reads], where: Any) -> tuple[Reads, Reads]:
    keys, values = (Reads(*(each[where] for each in part)) for part in stored)
    return keys, values


@check("WIN-10a", "windowed")
def a_ring_turns_over_in_any_format(subject: Subject) -> None:
    """Replaces quiet tokens by loud ones in the ring, and loud ones by quiet ones. The sinks do not change."""
    for name in one_of_each_kind(subject, "dtype"):
        ring = Ring(subject, name, sinks=2)
        window = ring.config["window"]
        for count, loud in ((3, 1.0), (window, LOUD), (1, 1 / LOUD), (2 * window, 1.0), (2, LOUD)):
            ring.append(count, loud)
            ring.holds(f"after {len(ring)} tokens in a window of {window}")


@check("WIN-10a", "windowed")
def a_draft_goes_with_its_scales(subject: Subject) -> None:
    subject.need(rollback=1)
    for name in one_of_each_kind(subject, "dtype"):
        ring = Ring(subject, name, rollback=3)
        ring.append(ring.config["window"] + 2)
        length, drafted = len(ring), subject.size("tokens", min(2, ring.config["rollback"]))
        ring.append(drafted, LOUD)
        ring.truncate(length)
        ring.holds(f"after a draft of {drafted} tokens was truncated")
        ring.append(drafted, 1 / LOUD)
        ring.holds(f"that replace a draft of {drafted} tokens")
        ring.cache.clear()
        ring.stored = at(ring.stored, slice(0))
        ring.append(2, LOUD)
        ring.holds("that were appended after clear")


@check("WIN-10b", "windowed")
def a_step_sees_what_is_read_afterwards(subject: Subject) -> None:
    """A step attends over the stored values, those of its own tokens included: the values that `read` returns afterwards.

    The comparison finds only differences that exceed the error bound of attention.
    """
    for name in one_of_each_kind(subject, "dtype"):
        ring = Ring(subject, name, window=7)
        heads, dim = ring.shape
        ring.append(3)
        for count in dict.fromkeys(subject.size("tokens", each) for each in (1, 4, 3)):
            if count >= ring.config["window"] or ring.config["chunk"]:
                raise NotOffered("steps of fewer tokens than the window without chunks, where its limits do not allow them")
            begin, before = len(ring), ring.holds("before a step")
            known = [position for position in ring.seen(begin) if position < begin] + [*range(begin, begin + count)]
            query, scale = normal(subject, count, heads * subject.size("group_size", 2), dim), 2.5 / dim
            got = shaped(ring.cache.step(query, *ring.given(count), scale), query.shape, f"attention of {count} {name} tokens")
            ring.holds(f"after a step of {count} tokens")
            new_ones = ring.cache.read([*range(begin, begin + count)])
            keys, values = (np.concatenate(both) for both in zip(before, new_ones, strict=True))
            views = [np.array([known.index(each) for each in ring.seen(position)]) for position in range(begin, begin + count)]
            want, bound = exact(subject, query, keys, values, scale=scale, views=views, rotated=name in ROTATED)
            within(
                got,
                want,
                bound,
                f"attention of {count} {name} tokens after {begin}, compared with attention over the values that read returns",
            )


@check("WIN-10c", "windowed")
def what_a_format_cannot_hold_leaves_nothing_behind(subject: Subject) -> None:
    for name in one_of_each_kind(subject, "dtype"):
        ring = Ring(subject, name)
        ring.append(ring.config["window"] + 1)
        heads, dim = ring.shape
        for wrong in (np.nan, -np.inf):
            bad, good = (held(subject, tokens(subject, subject.size("tokens", 2), heads, dim)) for _ in range(2))
            bad[-1, -1, -1] = wrong
            for keys, values in ((bad, good), (good, bad)):
                with raises("NonFinite"):
                    ring.cache.append(keys, values)
                with raises("NonFinite"):
                    ring.cache.step(normal(subject, len(keys), heads, dim), keys, values, 1.0)
            equal(ring.cache.length, len(ring), f"length after a token with {wrong} raised NonFinite in {name}")
            ring.holds(f"after a token with {wrong} raised NonFinite")


@check("WIN-10d", "windowed")
def a_head_dim_that_no_group_goes_into_is_refused(subject: Subject) -> None:
    tried = 0
    for name in formats_of(subject, "dtype", *IN_GROUPS)[::7]:
        config = new(subject, "windowed", dtype=name, head_dim=2 * group_of(name)).config
        for dim in (group_of(name) + 1, group_of(name) // 2):
            if takes(subject, "head_dim", dim):
                tried += 1
                with raises("ConfigError"):
                    subject.new("windowed", **config | {"head_dim": dim})
    if not tried:
        raise NotOffered("a head_dim that is not a multiple of a group")
