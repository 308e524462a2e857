"""Checks of PREFIX: adapters and media, by which blocks of equal tokens are distinguished."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.paged.fixture import need_tokens
from kvref_conformance.families.prefix import MediaItem
from kvref_conformance.families.prefix.fixture import OTHER, PrefixFixture, prompt
from kvref_conformance.testlib.assertions import assert_equal, raises
from kvref_conformance.testlib.fixtures import require_sizes
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


@check("PREFIX-17c", "prefix")
def empty_sequences_keep_their_adapter(subject: Subject) -> None:
    """All tokens are truncated, or overwritten. Those that are committed next have the adapter and the salt of the sequence."""
    need_tokens(subject)
    subject.require_size(sequences=2)
    for change, label in product(("truncate", "write"), (("", "a"), ("b", "a"))):
        served = PrefixFixture(subject, 16)
        tokens = prompt(2 * served.size)
        sequence = served.serve(prompt(2 * served.size, 2), *label)
        served.prompts[sequence] = tokens, *label
        if change == "truncate":
            served.cache.truncate(sequence, 0)
        served.write(sequence, 0, len(tokens))
        served.cache.commit(sequence, tokens)
        served.finds([*tokens, OTHER], len(tokens), *label)
        for other in (("", ""), ("b", ""), ("", "b")):
            assert_equal(served.match([*tokens, OTHER], *other), 0, f"match with another label, after {change} of all tokens")


@check("PREFIX-18ab", "prefix")
def match_compares_the_content_of_placeholders(subject: Subject) -> None:
    """Prompts whose media differ in content, place and length. The hit is that of `num_common` equal tokens."""
    subject.require_size(sequences=2)
    size = PrefixFixture(subject).size
    count = 4 * size
    places = [(size - 1, 2 * size + 1), (size, 2 * size), (0, count), (count - 1, count), (1, 2)]
    committed = [[], *([_item(*place, "a")] for place in places), [_item(0, size, "a"), _item(size, 2 * size + 1, "b")]]
    committed += [[_item(0, 1, "a"), _item(1, size, "b")]] if size > 1 else []
    for media in committed:
        served = PrefixFixture(subject, block_size=size)
        served.serve(_tokens(count, media), media=media)
        for other in _media_lists(count, size):
            hit = served.hit(num_common(count, media, other))
            tokens = [*_tokens(count, other), OTHER]
            assert_equal(served.match(tokens, media=other), hit, f"match with media {other}, committed with {media}")
            if hit and len(other) == 2:
                served.finds(tokens, hit, media=other)


def _item(start: int, stop: int, name: str) -> MediaItem:
    """An item whose content has a length of its own."""
    return start, stop, f"{name} of {stop - start} tokens"


def _tokens(count: int, media: Sequence[MediaItem]) -> list[int]:
    """A prompt in which the tokens of all media are the same placeholder."""
    parts = _parts(media)
    return [PLACEHOLDER if position in parts else token for position, token in enumerate(prompt(count))]


def _media_lists(count: int, size: int) -> list[list[MediaItem]]:
    """Lists of media whose items begin and end at the borders of blocks, or one position beside them."""
    borders = sorted({at for block in range(0, count + 1, size) for at in (block - 1, block, block + 1) if 0 <= at <= count})
    items = [_item(start, stop, name) for start, stop in combinations(borders, 2) for name in ("a", "b")]
    pairs = [
        [_item(0, at, one), _item(at, stop, two)] for at, stop in combinations(borders[1:], 2) for one, two in ("ab", "aa", "ba")
    ]
    return [[], *([item] for item in items), *pairs]


def num_common(count: int, media: Sequence[MediaItem], other: Sequence[MediaItem]) -> int:
    """The number of leading tokens that are equal with both media: the definition of PREFIX-18 (a), position by position."""
    first, second = _parts(media), _parts(other)
    return next((at for at in range(count) if first.get(at) != second.get(at)), count)


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
    media = [_item(2 * size, 4 * size, "a")]
    served.serve(_tokens(4 * size, media), media=media)
    for later in ([], [_item(2 * size, 4 * size, "b")], [_item(2 * size, 3 * size, "b"), _item(3 * size, 4 * size, "a")]):
        served.finds([*_tokens(4 * size, later), OTHER], 2 * size, media=later)
    served.finds([*prompt(2 * size), OTHER], 2 * size)


@check("PREFIX-18c", "prefix")
def sequences_keep_their_media(subject: Subject) -> None:
    """A prompt is committed in steps, by a sequence and its fork."""
    subject.require_size(sequences=3)
    served = PrefixFixture(subject, 16)
    size = served.size
    tokens, media = [PLACEHOLDER] * (3 * size), [_item(0, size, "a"), _item(size, 3 * size, "b")]
    parent, _ = served.begin(tokens, media=media)
    served.write(parent, 0, size)
    served.cache.commit(parent, tokens[:size])
    child = served.cache.fork(parent)
    served.prompts[child] = served.prompts[parent]
    for count in (2, 3):
        served.write(child, (count - 1) * size, count * size)
        served.cache.commit(child, tokens[: count * size])
        served.finds([*tokens, OTHER], count * size, media=media)
    served.finds([*tokens[:size], OTHER], size, media=media[:1])
    served.finds([*tokens, OTHER], size, media=[media[0], _item(size, 3 * size, "a")])


@check("PREFIX-18c", "prefix")
def truncated_or_overwritten_positions_have_no_media(subject: Subject) -> None:
    for change in ("truncate", "write"):
        _commit_text_after(subject, change)


@check("PREFIX-18c", "prefix")
def positions_that_are_overwritten_in_one_layer_have_no_media(subject: Subject) -> None:
    require_sizes(PrefixFixture(subject).cache, num_layers=2)
    for change in ("write in the first layer", "write in the last layer"):
        _commit_text_after(subject, change)


@check("PREFIX-18c", "prefix")
def removed_positions_have_no_media(subject: Subject) -> None:
    _commit_text_after(subject, "remove")


def _commit_text_after(subject: Subject, change: str) -> None:
    """After a change of the last positions, the tokens that are committed there are text. The media before them stay."""
    need_tokens(subject)
    subject.require_size(sequences=2)
    for with_hit in (False, True):
        served = PrefixFixture(subject, 24)
        size, cache = served.size, served.cache
        start, count = size + 1 if size > 1 else 1, 3 * size
        media = [_item(0, start, "a"), _item(start, count, "b")]
        sequence = served.serve(_tokens(count, media), media=media)
        if with_hit:
            sequence, _ = served.begin([*_tokens(count, media), OTHER], media=media)
        tokens = [*_tokens(start, media[:1]), *prompt(count - start, 2)]
        served.prompts[sequence] = tokens, "", "", media[:1]
        if change == "truncate":
            cache.truncate(sequence, start)
        elif change == "remove":
            cache.remove(sequence, start, start + 1)
        layers = {"write in the first layer": served.layers[:1], "write in the last layer": served.layers[-1:]}.get(change)
        served.write(sequence, count - 1 if change == "remove" else start, count, layers)
        cache.commit(sequence, tokens)
        served.finds([*tokens, OTHER], count, media=media[:1])


@check("PREFIX-18c", "prefix")
def loaded_tokens_have_no_media(subject: Subject) -> None:
    need_tokens(subject)
    subject.require_size(sequences=2)
    served = PrefixFixture(subject, 16)
    count, cache = 2 * served.size, served.cache
    media, text = [_item(0, count, "a")], prompt(count, 2)
    sequence, (other, _) = served.serve(_tokens(count, media), media=media), served.begin(text)
    served.write(other, 0, count)
    cache.load(sequence, cache.save(other))
    cache.commit(sequence, text)
    assert_equal(served.match([*text, OTHER]), count, "match of text that was loaded in place of media, and committed")


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
