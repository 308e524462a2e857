"""What the laws know a family by: tokens are appended, read, forgotten, and everything can be looked at.

Each family that tokens can be appended to has a class derived from `Stream` in its stream.py. What `Stream` itself leaves open
are facts that a family may not have; a law that needs one runs on the families that have it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.counts import Counter
from kvref_conformance.checking.expect import equal, same
from kvref_conformance.checking.setup import new, other, pair_of_tokens, takes, tokens
from kvref_conformance.conversation.calls import Own
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families import all_families
from kvref_conformance.oracle.expected import exactly
from kvref_conformance.oracle.rows import Reads
from kvref_conformance.outcome import NotOffered

Bad = tuple[str, str, tuple[Any, ...]]  # the error's kind, and the method and arguments that must raise it


SHAPE = ("num_layers", "num_kv_heads", "head_dim", "rank", "rope_dim", "window")  # what files go by
MANY = 11  # tokens: more than a block, a tail, an initial capacity


class Stream(ABC):
    """One cache, or one sequence and layer of it, that tokens [n, heads, dim] are appended to."""

    family: ClassVar[str]

    def __init__(self, subject: Subject, **changes: Any) -> None:
        self.subject = subject
        self.cache: Handle = new(subject, self.family, **changes)
        self.config = self.cache.config
        self.taken = 0  # tokens since it was made, or emptied

    def fresh(self, **changes: Any) -> "Stream":
        """One of another cache."""
        return type(self)(self.subject, **changes)

    def another(self) -> "Stream":
        """One that shares with it as much as two can."""
        return self.fresh()

    def tokens(self, count: int) -> tuple[NDArray, NDArray]:
        """Keys and values [n, heads, dim] of so many tokens more: what two parts a token has is the family's business."""
        return pair_of_tokens(self.subject, count, self.config.get("num_kv_heads"), self.config.get("head_dim"))

    def laid_out(self, tokens: NDArray) -> NDArray:
        """Tokens [n, heads, dim] as the cache takes them."""
        return tokens

    def give(self, keys: NDArray | Own, values: NDArray | Own) -> None:
        """Append arrays that are laid out already, or that the cache is to refuse."""
        self.cache.append(keys, values)

    def append(self, keys: NDArray, values: NDArray) -> None:
        self.need_room(len(keys))
        self.give(self.laid_out(keys), self.laid_out(values))
        self.taken += len(keys)

    def need_room(self, count: int) -> None:
        """Raises NotOffered where its limits leave no room for so many tokens more: by our own count, for its may be wrong."""
        if self.subject.limits.declared and (wanted := self.taken + count) > self.room():
            raise NotOffered(f"room for {wanted} tokens, where its limits leave {self.room()}")

    def __len__(self) -> int:
        with self.subject.looking():
            return int(self.length())

    @abstractmethod
    def length(self) -> int: ...

    def read(self) -> tuple[NDArray, NDArray]:
        """Keys and values [n, heads, dim]."""
        return tuple(self.cache.read())

    def forget(self) -> None:
        """Give every token back."""
        self.cache.clear()
        self.taken = 0

    def expected(self, keys: NDArray, values: NDArray) -> tuple[Reads, Reads]:
        """What the appended tokens read back as, by the oracle, while none is evicted."""
        return exactly(keys), exactly(values)

    def observe(self) -> dict[str, Any]:
        """Everything that can be seen of it."""
        with self.subject.looking():
            seen: dict[str, Any] = {"length": len(self)}
            seen["keys"], seen["values"] = (np.array(part) for part in self.read())
            return seen | dict(self.numbers())

    @abstractmethod
    def numbers(self) -> Iterable[tuple[str, Any]]:
        """What can be seen of it besides its tokens."""

    def attributes(self, *names: str) -> Iterator[tuple[str, Any]]:
        """Those of its attributes that are offered."""
        for name in names:
            try:
                yield name, getattr(self.cache, name)
            except NotOffered:
                continue

    def overwrite(self, keys: NDArray, values: NDArray) -> None:  # noqa: B027 - most caches cannot
        """Put other tokens in the place of the first, where that can be done."""

    def wrong_shapes(self) -> list[tuple[NDArray, NDArray]]:
        """Keys and values that the cache may not take."""
        subject = self.subject
        count = subject.size("tokens", 2)
        good, more = (self.laid_out(tokens(subject, each)) for each in (count, count + 1))
        few_heads = self.laid_out(tokens(subject, count, heads=other(subject.heads)))
        wide = self.laid_out(tokens(subject, count, dim=subject.dim + 1))
        narrow = self.laid_out(tokens(subject, count, dim=other(subject.dim)))
        bad = [(few_heads, few_heads), (wide, wide), (narrow, narrow), (good, narrow), (good, few_heads)]
        bad += [(good, more)] if subject.size("tokens", count + 1) > count else []
        return [*bad, (good.reshape(-1), good.reshape(-1)), (good[None], good[None]), (good[..., 0], good[..., 0])]

    # Facts that a family may have: one that it does not override is not known of it, and laws that need it do not run.

    def out_of_range(self) -> list[Bad]:
        """Calls that name a layer, head, position or sequence which is not there."""
        return []

    def other_ways_in(self) -> dict[str, list[tuple[Any, ...]]]:
        """Methods besides `give`'s that take arrays, each with arguments in which only a shape is wrong."""
        raise NotImplementedError

    def wrong_use(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Calls that no one should make, and most of which have to be refused."""
        raise NotImplementedError

    def counters(self, appended: int) -> Iterator[Counter]:
        """What it counts, after so many tokens at most. A sequence that was dropped has nothing left to count."""
        raise NotImplementedError

    def sizes_for(self, tokens: int) -> dict[str, Any]:
        """The sizes of a cache in which a stream has room for so many tokens, where its limits allow them."""
        raise NotImplementedError

    def room(self) -> int:
        """Tokens that it may hold before any is refused, or forgotten for others."""
        raise NotImplementedError

    def quantizing(self) -> "Iterator[Stream]":
        """Fresh streams that quantize what is appended at once, one a format."""
        raise NotImplementedError

    def in_formats(self) -> "Iterator[Stream]":
        """Fresh streams of formats with scales, one of each kind that it stores, in sizes that its groups go into."""
        raise NotImplementedError

    def saved(self) -> Any:
        """What `save` gives of it, uint8 [n]."""
        return np.array(self.subject.numpy(self.saved_as_is()))

    def saved_as_is(self) -> Any:
        """The same in the implementation's own memory."""
        raise NotImplementedError

    def load(self, data: Any) -> None:
        """Let it hold what was saved."""
        raise NotImplementedError

    def elsewhere(self) -> "Stream":
        """A fresh one that may load what this one saved, of other sizes where they do not matter (MOVE-02)."""
        return self.fresh()

    def unlike(self) -> "Iterator[Stream]":
        """Fresh ones that may not: of one layer, head or number more, or of another format."""
        record = all_families()[self.family]
        sizes = [(name, self.config[name] + 1) for name in SHAPE if name in self.config]
        formats = [(name, each) for name, among in record.formats.items() for each in among if each != self.config[name]]
        for name in dict.fromkeys(name for name, _ in (*sizes, *formats)):
            others = (self.config | {name: value} for each, value in (*sizes, *formats) if each == name)
            fitting = (other for other in others if takes(self.subject, name, other[name]) and record.together(other))
            if (config := next(fitting, None)) is not None:
                yield self.fresh(**config)

    def read_as_is(self) -> Any:
        """Keys and values in the implementation's own memory, which nobody writes to later."""
        raise NotImplementedError


def wrong_pairs(subject: Subject) -> list[tuple[NDArray, NDArray]]:
    """Keys and values of one token, in which only a shape is wrong."""
    wide, few_heads = tokens(subject, 1, dim=subject.dim + 1), tokens(subject, 1, heads=other(subject.heads))
    flat = tokens(subject, 1)[0]
    good, two = tokens(subject, 1), tokens(subject, 2)
    return [(wide, wide), (few_heads, few_heads), (flat, flat), (two, two), (good, wide), (good, two)]


def wrong_queries(subject: Subject) -> list[NDArray]:
    """Of a wrong width, of too few axes, and of heads that cannot share the kv heads evenly, where there are several of these."""
    uneven = [tokens(subject, 1, heads=subject.heads + 1)] if subject.heads > 1 else []
    return [tokens(subject, 1, dim=subject.dim + 1), tokens(subject, 1)[0], *uneven]


def knows(stream: type[Stream], fact: str) -> bool:
    return getattr(stream, fact) is not getattr(Stream, fact)


def filled(stream: Stream, count: int = MANY) -> tuple[Stream, NDArray, NDArray]:
    """The stream itself, with so many tokens more, and the tokens."""
    keys, values = stream.tokens(count)
    stream.append(keys, values)
    return stream, keys, values


def same_observables(got: dict[str, Any], want: dict[str, Any], when: str) -> None:
    for name in want:
        (same if name in ("keys", "values") else equal)(got[name], want[name], f"{name} {when}")
