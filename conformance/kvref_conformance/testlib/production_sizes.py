"""Production sizes, and streams that are filled with content (testlib/tagged_content.py) at these sizes."""

from collections.abc import Iterable

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.testlib.assertions import assert_equal
from kvref_conformance.testlib.law_adapter import LawAdapter
from kvref_conformance.testlib.tagged_content import WrittenContent, assert_content, content_pair

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
BLOCK_SIZES = (16, 32, 64, 128)
# kv heads x head_dim of Llama 3 and Qwen 3, Gemma 3, Phi 3, GPT-2, a smaller Qwen 3, DeepSeek's latent vectors.
MODEL_SHAPES = ((8, 128), (4, 256), (32, 96), (12, 64), (4, 128), (1, 576))
POWERS_OF_TWO = (16, 64, 128, 256, 512, 1024, 4096)
TOKENS_PER_CALL = 256  # tokens whose content is computed at once, also if they are appended one by one
MAX_CALLS = 1000  # maximum number of appending calls per check if the tokens per call are limited; they take a few seconds


def power_of_two_edges(limit: int, powers: Iterable[int] = POWERS_OF_TWO) -> list[int]:
    """Powers of two and their neighbors, up to the limit: sizes at which blocks, tables, tiles and integer types end."""
    return [each for power in powers for each in (power - 1, power, power + 1) if each <= limit]


def affordable_tokens(subject: Subject, tokens: int, times: int = 1) -> int:
    """The number of tokens; if the tokens per call are limited, at most as many as CALLS calls append `times` times."""
    most = subject.limits.limit(subject.family, "tokens").largest
    return tokens if most is None else min(tokens, max(1, MAX_CALLS * most // times))


class FilledStream:
    """A stream to which content is appended, and whose tokens can be compared with the expected content.

    number: the number of the stream in its content. count: the number of appended tokens. shared: the number of a shared prefix's
    stream, and how many tokens are the prefix's.
    """

    def __init__(self, stream: LawAdapter, number: int = 0, written: WrittenContent | None = None) -> None:
        config = stream.cache.config
        self.stream, self.number, self.count = stream, number, 0
        self.shared = 0, 0
        self.written = written or WrittenContent(config["num_kv_heads"], config["head_dim"])
        self._next = range(0)  # the positions whose content is computed
        self._content: tuple[NDArray, NDArray] = self._expected_content(self._next)

    @property
    def room(self) -> int:
        """The number of tokens that the stream can contain before an append raises or tokens are evicted."""
        return self.stream.room()

    def streams(self, positions: range) -> NDArray:
        """The number of the content's stream at each position: that of the shared prefix, or of this stream."""
        return np.where(np.array(positions) < self.shared[1], self.shared[0], self.number)

    def append(self, count: int) -> None:
        """Append `count` tokens, or fewer if there is less room."""
        count = min(count, self.room - self.count)
        if self.count not in self._next or self.count + count > self._next.stop:
            self._next = range(self.count, self.count + max(count, min(TOKENS_PER_CALL, self.room - self.count)))
            self._content = self._expected_content(self._next)
        at = self.count - self._next.start
        keys, values = (part[at : at + count] for part in self._content)
        self.stream.append(keys, values)
        self.count += count
        self.written.add_up_to(self.number, 0, self.count)
        self.written.add_up_to(self.shared[0], 0, self.shared[1])

    def fill_to(self, count: int) -> None:
        self.append(count - self.count)

    def assert_content(self) -> None:
        """Raise ClauseViolation unless the stream contains every token in its place."""
        assert_equal(len(self.stream), self.count, f"tokens of sequence {self.number}")
        streams, given = self.streams(range(self.count)), self._expected_content(range(self.count))
        exact = self.stream.subject.level == "exact"
        assert_content(self.stream.read(), streams, 0, range(self.count), self.written, exact, self.stream.expected(*given))

    def clear(self) -> None:
        """Clear the stream. Its tokens have the next number from now on."""
        self.stream.clear()
        self.start_content(self.number + 1)

    def start_content(self, number: int, shared: tuple[int, int] = (0, 0)) -> None:
        """Start a new content for an empty stream. number: its number. shared: a prefix's stream, and how many tokens are its."""
        self.number, self.count, self.shared, self._next = number, 0, shared, range(0)

    def _expected_content(self, positions: range) -> tuple[NDArray, NDArray]:
        return content_pair(self.streams(positions), 0, positions, self.written.heads, self.written.dim)
