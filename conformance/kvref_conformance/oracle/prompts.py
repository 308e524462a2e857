"""Prompts, by whose tokens caches find prefixes: the errors of invalid tokens, and the reads that look for committed prompts."""

from collections.abc import Sequence
from typing import Any

from kvref_conformance.oracle.expectations import Errors, range_errors
from kvref_conformance.oracle.reference_model import ReadCall

MOST_TOKEN = 2**63
LAST_TOKEN = 2**40  # appended to a prompt for `match`, because a hit never includes the last token
MAX_MATCHED = 3  # committed prompts that are matched after each call


def token_errors(tokens: Sequence[Any], clause: str = "LAW-11") -> Errors:
    """The errors of tokens that are no integers in [0, MOST_TOKEN)."""
    return [wrong for token in tokens for wrong in range_errors(token, MOST_TOKEN, "TokenOutOfRange", clause)]


def match_reads(prompts: Sequence[tuple[str, Sequence[int]]]) -> list[ReadCall]:
    """The calls of `match` that find the prompts, each a salt and tokens."""
    return [("match", {"tokens": [*tokens, LAST_TOKEN], "salt": salt}) for salt, tokens in prompts]
