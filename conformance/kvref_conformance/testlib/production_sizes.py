"""Production sizes, and streams that are filled with content (testlib/tagged_content.py) at these sizes."""

from collections.abc import Iterable

from kvref_conformance.calls.subject import Subject
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.testlib.assertions import assert_equal, assert_within, default_scale, expected_attention
from kvref_conformance.testlib.law_adapter import LawAdapter
from kvref_conformance.testlib.tagged_content import SequenceContent, WrittenContent, assert_content

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

    content: the content, whose stream is the number of this one. count: the number of tokens. total_appended: of all contents.
    """

    def __init__(self, stream: LawAdapter, number: int = 0, written: WrittenContent | None = None) -> None:
        config = stream.cache.config
        self.stream, self.content, self.count, self.total_appended = stream, SequenceContent(number), 0, 0
        self.written = written or WrittenContent(config["num_kv_heads"], config["head_dim"])
        self._next = range(0)  # the positions whose content is computed
        self._content: tuple[NDArray, NDArray] = self._expected_content(self._next)

    @property
    def room(self) -> int:
        """The number of tokens that the stream can contain before an append raises or tokens are evicted."""
        return self.stream.room()

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
        self.total_appended += count
        self.written.add_range(self.content, 0, range(self.count - count, self.count))

    def fill_to(self, count: int) -> None:
        self.append(count - self.count)

    def assert_content(self) -> None:
        """Raise ClauseViolation unless the stream contains every token in its place."""
        assert_equal(len(self.stream), self.count, f"tokens of sequence {self.content.number}")
        given, exact = self._expected_content(range(self.count)), self.stream.subject.level == "exact"
        streams, places = self.content.at(range(self.count))
        assert_content(self.stream.read(), streams, 0, places, self.written, exact, self.stream.expected(*given))

    def assert_attention(self, *where: int) -> None:
        """Raise ClauseViolation unless `attend(*where, query, scale)` of one query is right, if reads are known to the bit."""
        subject, heads = self.stream.subject, self.written.heads * self.stream.subject.size("group_size", 2)
        keys, values = self.stream.expected(*self._expected_content(range(self.count)))
        query, _ = self.content.pair(0, [self.count], heads, self.written.dim)
        scale = default_scale(subject) / 64
        ranks = self.stream.config.get("token_ranks", 1)
        want, bound = expected_attention(subject, query, keys.values, values.values, scale=scale, ranks=ranks)
        if subject.level == "exact" or not (keys.slack.any() or values.slack.any()):
            assert_within(self.stream.cache.attend(*where, query, scale), want, bound, f"attend of {self.count} tokens")

    def truncate(self, count: int) -> None:
        """Keep the first `count` tokens. Tokens that are appended later differ from those that are removed."""
        self.stream.truncate(count)
        self.content.truncate(count)
        self.count, self._next = count, range(0)

    def clear(self) -> None:
        """Clear the stream. Its tokens have the next number from now on."""
        self.stream.clear()
        self.start_content(SequenceContent(self.content.number + 1))

    def start_content(self, content: SequenceContent) -> None:
        """Start a new content for an empty stream."""
        self.content, self.count, self._next = content, 0, range(0)

    def _expected_content(self, positions: range) -> tuple[NDArray, NDArray]:
        return self.content.pair(0, positions, self.written.heads, self.written.dim)
