"""Sizes that models have, and streams that are filled with content at such sizes."""

from collections.abc import Iterable

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.content import Written, belongs, pair_of_content
from kvref_conformance.checking.expect import equal
from kvref_conformance.checking.streams import Stream
from kvref_conformance.conversation.subject import Subject

DIMS = (64, 80, 96, 128, 192, 256)
BLOCK_SIZES = (16, 32, 64, 128)
# kv heads x head_dim of Llama 3 and Qwen 3, Gemma 3, Phi 3, GPT-2, a smaller Qwen 3, DeepSeek's latent vectors.
MODELS = ((8, 128), (4, 256), (32, 96), (12, 64), (4, 128), (1, 576))
POWERS = (16, 64, 128, 256, 512, 1024, 4096)
AT_ONCE = 256  # tokens whose content is worked out together, also where they come one by one
CALLS = 1000  # that a check makes to hand tokens in, where a call takes only some: a few seconds


def edges(limit: int, powers: Iterable[int] = POWERS) -> list[int]:
    """Powers of two and their neighbours, not past the limit: where blocks, tables, tiles and types end."""
    return [each for power in powers for each in (power - 1, power, power + 1) if each <= limit]


def affordable(subject: Subject, tokens: int, times: int = 1) -> int:
    """So many tokens; where one call takes only some, no more than are handed in `times` times by CALLS calls."""
    most = subject.limits.of(subject.family, "tokens").largest
    return tokens if most is None else min(tokens, max(1, CALLS * most // times))


class Filled:
    """A stream of content: what is appended is known by its number, and compared with what belongs there."""

    def __init__(self, stream: Stream, number: int = 0, written: Written | None = None) -> None:
        config = stream.cache.config
        self.stream, self.number, self.count = stream, number, 0
        self.shared = 0, 0  # the stream of a prefix, and how many tokens are its
        self.written = written or Written(config["num_kv_heads"], config["head_dim"])
        self._next = range(0)  # positions whose content is worked out
        self._content: tuple[NDArray, NDArray] = self._worked_out(self._next)

    @property
    def room(self) -> int:
        """Tokens that it may hold before any is refused, or forgotten for others."""
        return self.stream.room()

    def streams(self, positions: range) -> NDArray:
        """Whose tokens lie at these positions."""
        return np.where(np.array(positions) < self.shared[1], self.shared[0], self.number)

    def append(self, count: int) -> None:
        """So many tokens more, or as many as there is room for."""
        count = min(count, self.room - self.count)
        if self.count not in self._next or self.count + count > self._next.stop:
            self._next = range(self.count, self.count + max(count, min(AT_ONCE, self.room - self.count)))
            self._content = self._worked_out(self._next)
        at = self.count - self._next.start
        keys, values = (part[at : at + count] for part in self._content)
        self.stream.append(keys, values)
        self.count += count
        self.written.up_to(self.number, 0, self.count)
        self.written.up_to(self.shared[0], 0, self.shared[1])

    def up_to(self, count: int) -> None:
        self.append(count - self.count)

    def look(self) -> None:
        """Raise Broken unless every token is there, and in its place."""
        equal(len(self.stream), self.count, f"tokens of sequence {self.number}")
        streams, given = self.streams(range(self.count)), self._worked_out(range(self.count))
        exact = self.stream.subject.level == "exact"
        belongs(self.stream.read(), streams, 0, range(self.count), self.written, exact, self.stream.expected(*given))

    def forget(self) -> None:
        """From now on the stream holds tokens of the next number."""
        self.stream.forget()
        self.begin(self.number + 1)

    def begin(self, number: int, shared: tuple[int, int] = (0, 0)) -> None:
        """From now on tokens of this number are appended to what is empty, the first of which are a prefix's."""
        self.number, self.count, self.shared, self._next = number, 0, shared, range(0)

    def _worked_out(self, positions: range) -> tuple[NDArray, NDArray]:
        return pair_of_content(self.streams(positions), 0, positions, self.written.heads, self.written.dim)
