"""The words of a canary: a token is a word, of a length that all words of one canary have.

Each kv head has its own syllables in a word, in the order of the heads: one syllable if the head carries up to four bits, else
two. A wrong syllable therefore identifies the head. All words have the same length. A text can therefore be split into words
whether or not an engine puts spaces between them.
"""

import contextlib
import functools
import re
from collections.abc import Iterable

from kvref.canary import BLANK, BOS, EOS, FIRST_WORD, UNKNOWN
from kvref.canary.hybrid import AnyCanary
from kvref.errors import TokenOutOfRange, in_range

SYLLABLES = ("ba", "de", "fi", "go", "hu", "ka", "le", "mi", "no", "pu", "ra", "se", "ti", "vo", "wu", "za")
SILENT_SYLLABLE = "xo"  # not in SYLLABLES: the blank is an ordinary word, so that no engine omits it from its output
SPECIAL_WORDS = {UNKNOWN: "<unk>", BOS: "<s>", EOS: "</s>"}
MAX_QUOTED = 40  # characters of a text that is not understood


class NotCanaryWords(Exception):
    """A text that does not consist of a canary's words. The message gives the position and the text there."""


@functools.cache
def vocabulary(canary: AnyCanary) -> tuple[str, ...]:
    """The word of each token. All differ; ids that carry nothing are <unusedN>."""
    each = -(-canary.bits // 4)  # syllables per head
    words = [SPECIAL_WORDS.get(token, f"<unused{token}>") for token in range(canary.vocabulary)]
    words[BLANK] = SILENT_SYLLABLE * each * canary.num_kv_heads
    for token in range(FIRST_WORD, FIRST_WORD + canary.words):
        digits = canary.digits(token)
        words[token] = "".join(SYLLABLES[digit >> 4 * part & 15] for digit in digits for part in reversed(range(each)))
    return tuple(words)


def word_of(canary: AnyCanary, token: int) -> str:
    """The word of a token. Raises TokenOutOfRange."""
    return vocabulary(canary)[in_range(token, canary.vocabulary, TokenOutOfRange, "token")]


def to_text(canary: AnyCanary, tokens: Iterable[int]) -> str:
    """Tokens as words with spaces between them. Raises TokenOutOfRange."""
    return " ".join(word_of(canary, token) for token in tokens)


def to_tokens(canary: AnyCanary, text: str) -> list[int]:
    """The tokens of a text of words, with or without spaces between them. Raises NotCanaryWords at the first that is no word."""
    ids, pattern = _word_pattern(canary)
    found, place = list[int](), len(text) - len(text.lstrip())
    while place < len(text):
        match = pattern.match(text, place)
        if match is None or match[1] not in ids:
            like = word_of(canary, FIRST_WORD)
            raise NotCanaryWords(
                f"text: expected words of {len(like)} letters such as {like}, got {text[place : place + MAX_QUOTED]!a} "
                f"at character {place}"
            )
        found.append(ids[match[1]])
        place = match.end()
    return found


def to_tokens_of_prefix(canary: AnyCanary, text: str) -> list[int]:
    """Return the tokens of a text that may end within a word; the incomplete word is dropped. Raises NotCanaryWords."""
    for missing in range(len(word_of(canary, BLANK))):
        with contextlib.suppress(NotCanaryWords):
            return to_tokens(canary, text[: len(text) - missing])
    return to_tokens(canary, text)


@functools.cache
def _word_pattern(canary: AnyCanary) -> tuple[dict[str, int], re.Pattern[str]]:
    """Return the token of each word, and a pattern of a word and the spaces after it."""
    words = vocabulary(canary)
    pattern = rf"([a-z]{{{len(words[BLANK])}}}|<[a-z0-9/]{{1,20}}>)\s*"
    return {each: token for token, each in enumerate(words)}, re.compile(pattern)
