"""Checks of PREFIX: adapters and media, by which blocks of equal tokens are distinguished."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.paged.fixture import need_tokens
from kvref_conformance.families.prefix import MediaItem
from kvref_conformance.families.prefix.fixture import OTHER, PrefixFixture, prompt
from kvref_conformance.testlib.assertions import assert_equal, raises
from kvref_conformance.testlib.registry import check

PLACEHOLDER = 9
HASH = "6f1ed002ab5595859014ebf0951522d9"
# Pairs of a salt and an adapter, of which no two may be taken for each other.
LABELS = [
    ("", ""), ("", "a"), ("a", ""), ("a", "a"), ("a", "b"), ("b", "a"), ("ab", ""), ("", "ab"), ("a:b", ""), ("a", "b "),
    (HASH, "a"), (HASH, "b"), ("", HASH + "a"), ("", HASH + "b"), ("", "a" + HASH), ("", "b" + HASH),
]  # fmt: skip


@check("PREFIX-17ab", "prefix")
def match_distinguishes_adapters(subject: Subject) -> None:
    subject.require_size(sequences=2)
    for label in LABELS:
        served = PrefixFixture(subject)
        tokens = prompt(2 * served.size)
        served.serve(tokens, *label)
        for other in LABELS:
            hit = 2 * served.size * (label == other)
            what = "match with salt {!r} and adapter {!r}, where the tokens were committed with {!r} and {!r}"
            assert_equal(served.match([*tokens, OTHER], *other), hit, what.format(*other, *label))
        served.finds([*tokens, OTHER], 2 * served.size, *label)
        served.finds([*tokens, OTHER], 0, "", "another")


@check("PREFIX-17c", "prefix")
def fork_has_the_adapter_of_its_parent(subject: Subject) -> None:
    subject.require_size(sequences=3)
    for count in (0, 1):  # committed blocks before the fork
        served = PrefixFixture(subject, 16)
        size, tokens = served.size, prompt(2 * served.size)
        parent, _ = served.begin(tokens, adapter="a")
        served.write(parent, 0, count * size)
        served.cache.commit(parent, tokens[: count * size])
        child = served.cache.fork(parent)
        served.prompts[child] = served.prompts[parent]
        served.write(child, count * size, 2 * size)
        served.cache.commit(child, tokens)
        served.finds([*tokens, OTHER], 2 * size, adapter="a")
        served.finds([*tokens, OTHER], 0)


@check("PREFIX-18ab", "prefix")
def match_compares_the_content_of_placeholders(subject: Subject) -> None:
    """All placeholders of a prompt are one token. The hit with any other media is that of `num_common` equal tokens."""
    subject.require_size(sequences=2)
    served = PrefixFixture(subject)
    size, count = served.size, 4 * served.size
    tokens = [PLACEHOLDER] * count
    places = [(size - 1, 2 * size + 1), (size, 2 * size), (0, count), (count - 1, count), (1, 2)]
    committed = [
        [],
        *([(*place, "a")] for place in places),
        [(0, size, "a"), (size, 2 * size + 1, "b")],
        [(0, 1, "a"), (1, size, "b")],
    ]
    for media in [each for each in committed if all(start < stop for start, stop, _ in each)]:
        served = PrefixFixture(subject, block_size=size)
        served.serve(tokens, media=media)
        for other in _media_lists(count, size):
            hit = num_common(tokens, media, other) // size * size
            assert_equal(served.match([*tokens, OTHER], media=other), hit, f"match with media {other}, committed with {media}")
            if hit and len(other) == 2:
                served.finds([*tokens, OTHER], hit, media=other)


def _media_lists(count: int, size: int) -> list[list[MediaItem]]:
    """Lists of media whose items begin and end at the borders of blocks, or one position beside them."""
    borders = sorted({at for block in range(0, count + 1, size) for at in (block - 1, block, block + 1) if 0 <= at <= count})
    items = [(start, stop, content) for start, stop in combinations(borders, 2) for content in ("a", "b")]
    pairs = [
        [(0, at, first), (at, stop, second)] for at, stop in combinations(borders[1:], 2) for first, second in ("ab", "aa", "ba")
    ]
    return [[], *([item] for item in items), *pairs]


def num_common(tokens: Sequence[int], media: Sequence[MediaItem], other: Sequence[MediaItem]) -> int:
    """The number of leading tokens that are equal with both media: the definition of PREFIX-18 (a), position by position."""
    first, second = _parts(media), _parts(other)
    return next((at for at in range(len(tokens)) if first.get(at) != second.get(at)), len(tokens))


def _parts(media: Sequence[MediaItem]) -> dict[int, tuple[str, int]]:
    """What each placeholder stands for: the content, and which part of it."""
    return {position: (content, position - start) for start, stop, content in media for position in range(start, stop)}


@check("PREFIX-18a", "prefix")
def match_compares_whole_contents(subject: Subject) -> None:
    subject.require_size(sequences=2)
    contents = [
        "",
        " ",
        "0",
        HASH,
        HASH[:-1],
        HASH[:-1] + "0",
        "0" + HASH[1:],
        HASH[:8] + "0" + HASH[9:],
        HASH[:-5] + "0" + HASH[-4:],
        HASH.upper(),
        f"{PLACEHOLDER}",
    ]
    for content in contents:
        served = PrefixFixture(subject)
        count = 2 * served.size
        tokens = [PLACEHOLDER] * count
        served.serve(tokens, media=[(0, count, content)])
        for other in contents:
            hit = count * (content == other)
            what = f"match with the content {other!r}, committed with {content!r}"
            assert_equal(served.match([*tokens, OTHER], media=[(0, count, other)]), hit, what)
        assert_equal(served.match([*tokens, OTHER], content), 0, "match with the content as a salt")


@check("PREFIX-18b", "prefix")
def match_ignores_later_media(subject: Subject) -> None:
    subject.require_size(sequences=2)
    served = PrefixFixture(subject)
    size = served.size
    tokens = [*prompt(2 * size), *[PLACEHOLDER] * 2 * size]
    served.serve(tokens, media=[(2 * size, 4 * size, "a")])
    for media in (
        [],
        [(2 * size, 4 * size, "b")],
        [(2 * size, 3 * size, "b"), (3 * size, 4 * size, "a")],
        [(3 * size, 4 * size, "a")],
    ):
        served.finds([*tokens, OTHER], 2 * size, media=media)
    served.finds([*tokens[: 2 * size], OTHER], 2 * size)


@check("PREFIX-18c", "prefix")
def sequences_keep_their_media(subject: Subject) -> None:
    """A prompt is committed in steps, by a sequence and its fork."""
    subject.require_size(sequences=3)
    served = PrefixFixture(subject, 16)
    size = served.size
    tokens, media = [PLACEHOLDER] * (3 * size), [(0, size, "a"), (size, 3 * size, "b")]
    parent, _ = served.begin(tokens, media=media)
    served.write(parent, 0, size)
    served.cache.commit(parent, tokens[:size])
    child = served.cache.fork(parent)
    served.prompts[child] = served.prompts[parent]
    for count in (2, 3):
        served.write(child, (count - 1) * size, count * size)
        served.cache.commit(child, tokens[: count * size])
        served.finds([*tokens, OTHER], count * size, media=media)
    served.finds([*tokens, OTHER], size, media=media[:1])
    served.cache.drop(child)
    served.write(parent, size, 2 * size)
    served.cache.commit(parent, tokens[: 2 * size])
    served.finds([*tokens[: 2 * size], OTHER], 2 * size, media=[media[0], (size, 2 * size, "b")])


@check("PREFIX-18c", "prefix")
def changed_positions_have_no_media(subject: Subject) -> None:
    """Media end where a sequence is truncated, or overwritten: the tokens that are committed there next stand for nothing."""
    need_tokens(subject)
    subject.require_size(sequences=2)
    for change in ("truncate", "write"):
        for hit_first in (False, True):
            served = PrefixFixture(subject, 24)
            size, cache = served.size, served.cache
            tokens, media = [PLACEHOLDER] * (3 * size), [(0, 3 * size, "a")]
            sequence = served.serve(tokens, media=media)
            if hit_first:
                sequence, _ = served.begin([*tokens, OTHER], media=media)
            start = size + 1 if size > 1 else 1
            left = [(0, start, "a")]
            served.prompts[sequence] = tokens, "", "", left
            if change == "truncate":
                cache.truncate(sequence, start)
            served.write(sequence, start, 3 * size)
            cache.commit(sequence, tokens)
            served.finds([*tokens, OTHER], 3 * size, media=left)
            if not subject.limits.switch(subject.family, "other_eviction_order"):
                served.finds([*tokens, OTHER], 3 * size, media=media)  # its cached blocks stay cached


@check("PREFIX-18d", "prefix")
def invalid_media_raise(subject: Subject) -> None:
    served = PrefixFixture(subject)
    size, cache = served.size, served.cache
    tokens: list[Any] = [PLACEHOLDER] * (size + 2)
    free, end = cache.num_free_blocks, len(tokens)
    invalid = [
        [(1, 1)],
        [(1, 0)],
        [(0, end + 1)],
        [(-1, 1)],
        [(end, end + 1)],
        [(0, 2), (1, 3)],
        [(1, 2), (0, 1)],
        [(0, 1), (0, 1)],
        [(0, 1), (1, 1)],
    ]
    for places in invalid:
        media = [[start, stop, "a"] for start, stop in places]
        for name in ("match", "begin"):
            with raises("PositionOutOfRange"):
                getattr(cache, name)(tokens, media=media)
    assert_equal(cache.num_free_blocks, free, "free blocks after rejected media")
    served.finds(tokens, 0, media=[(0, 1, "a"), (1, end, "b")])
