"""Checks of PREFIX-19: hits that end inside a block, of caches that declare token_hits."""

from contextlib import suppress

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.paged.checks_formats import PLACES, of_each_kind, of_format
from kvref_conformance.families.paged.fixture import need_tokens
from kvref_conformance.families.prefix.checks_eviction import evict_one_by_one
from kvref_conformance.families.prefix.fixture import (
    OTHER,
    PrefixFixture,
    has_token_hits,
    need_declared_order,
    prompt,
    with_free_entries,
)
from kvref_conformance.testlib.assertions import assert_equal, assert_pair, raises
from kvref_conformance.testlib.fixtures import block_table_of
from kvref_conformance.testlib.registry import check


def need_token_hits(subject: Subject) -> None:
    """Raises NotOffered unless the limits declare token hits, and allow blocks of several tokens."""
    if not has_token_hits(subject):
        raise NotOffered("hits that end inside a block, where its limits do not say token_hits")
    if subject.size("block_size", 4) == 1:
        raise NotOffered("blocks of several tokens, where its limits say block_size 1")


def differing(tokens: list[int], at: int) -> list[int]:
    """Returns a prompt of the same length whose tokens differ from position `at` on."""
    return [*tokens[:at], *prompt(len(tokens) - at, 90 + at)]


@check("PREFIX-19a", "prefix")
def match_finds_single_tokens(subject: Subject) -> None:
    need_token_hits(subject)
    for size in dict.fromkeys(subject.size("block_size", wanted) for wanted in (2, 3, 4, 16)):
        served = PrefixFixture(subject, block_size=size)
        tokens = prompt(2 * served.size)
        served.make_cached(tokens)
        for at in range(len(tokens)):
            served.finds(differing(tokens, at), at)
            served.finds(tokens[: at + 1], at)  # the last token is never part of a hit
        served.finds([*tokens, OTHER], len(tokens))


@check("PREFIX-19a", "prefix")
def match_finds_the_block_with_the_most_common_tokens(subject: Subject) -> None:
    need_token_hits(subject)
    for order in (1, -1):
        served = PrefixFixture(subject, 24, block_size=4)
        size, tokens = served.size, prompt(2 * served.size)
        lengths = range(size, 2 * size)  # of what each prompt has in common with `tokens`
        live = served.make_cached(*(differing(tokens, at) for at in lengths[::order]))
        served.finds([*tokens, OTHER], lengths[-1])
        for at in lengths:
            served.finds([*tokens[:at], OTHER, OTHER], at)
        for sequence in live:
            served.cache.drop(sequence)


@check("PREFIX-19a", "prefix")
def match_compares_the_label_of_single_tokens(subject: Subject) -> None:
    need_token_hits(subject)
    subject.require_size(sequences=2)
    served = PrefixFixture(subject, 24)
    size, tokens = served.size, prompt(2 * served.size)
    served.make_cached(tokens, salt="a")
    for salt, count in (("a", 2 * size - 1), ("", 0), ("b", 0)):
        served.finds(tokens, count, salt)
    served.finds([*tokens[size:], OTHER], 0, "a")  # other tokens are before them
    with suppress(NotOffered):
        served.serve(prompt(size, 3), adapter="a")
        served.finds(prompt(size, 3), size - 1, adapter="a")
        served.finds(prompt(size, 3), 0, "a")
    with suppress(NotOffered):
        places = [OTHER] * size
        served.serve(places, media=[(0, size, "a")])
        served.finds(places, size - 1, media=[(0, size, "a")])
        served.finds(places, 0, media=[(0, size, "b")])
        served.finds([*places, OTHER], 1, media=[(0, 1, "a"), (1, size, "b")])


@check("PREFIX-19a", "prefix")
def match_finds_no_tokens_of_blocks_that_are_not_cached(subject: Subject) -> None:
    """The tokens of a block are found as soon as it is committed in full, until it is evicted."""
    need_token_hits(subject)
    served = with_free_entries(subject, 3)
    size, tokens = served.size, prompt(2 * served.size)
    sequence, _ = served.begin(tokens)
    served.write(sequence, 0, 2 * size)
    served.cache.commit(sequence, tokens[: 2 * size - 1])
    assert_equal(served.match(tokens), size, "match of a prompt whose second block is committed in part")
    served.cache.commit(sequence, tokens)
    served.finds(tokens, 2 * size - 1)
    served.cache.drop(sequence)
    subject.require_size(sequences=2)
    served.allocate(3)
    assert_equal(served.match(tokens), 0, "match of a prompt whose blocks were evicted")


@check("PREFIX-19b", "prefix")
def begin_copies_the_tokens_of_the_source(subject: Subject) -> None:
    need_token_hits(subject)
    need_tokens(subject)
    served = PrefixFixture(subject, 24)
    size, tokens = served.size, prompt(2 * served.size)
    served.make_cached(tokens)
    for at in range(2 * size):
        sequence, hit = served.begin(differing(tokens, at))
        assert_equal(hit, at, f"the hit of a prompt that differs from position {at} on")
        served.compare(sequence, hit)
        served.write(sequence, hit, 2 * size)
        served.compare(sequence, 2 * size)
        served.cache.drop(sequence)


@check("PREFIX-19c", "prefix")
def writes_after_a_hit_do_not_reach_the_source(subject: Subject) -> None:
    need_token_hits(subject)
    need_tokens(subject)
    subject.require_size(sequences=3)
    for alive in (True, False):  # whether a sequence lists the source
        served = PrefixFixture(subject, 24)
        size, tokens = served.size, prompt(2 * served.size)
        first = served.serve(tokens)
        if not alive and not subject.limits.switch(subject.family, "other_eviction_order"):
            served.cache.drop(first)
        at = 2 * size - 1
        sharers = [served.begin([*tokens[:at], *prompt(1, which)])[0] for which in (2, 3)]  # both copy the same block
        for sequence in sharers:
            served.write(sequence, at, 2 * size)
        for sequence in sharers:
            served.compare(sequence, 2 * size)
            served.cache.commit(sequence, served.prompts[sequence][0])
        served.write(sharers[0], size, 2 * size)  # overwrites the copied tokens too
        served.look()
        for sequence in sharers:
            served.cache.drop(sequence)
        served.finds([*tokens, OTHER], 2 * size)
        if first in served.model.sequences:
            served.compare(first, 2 * size)


@check("PREFIX-19c", "prefix")
def begin_lists_a_block_of_its_own(subject: Subject) -> None:
    need_token_hits(subject)
    subject.require_size(sequences=3)
    served = PrefixFixture(subject, 24)
    size, tokens = served.size, prompt(2 * served.size)
    sequences = [served.serve(tokens), *(served.begin(tokens)[0] for _ in range(2))]
    tables = [block_table_of(served.cache, sequence, 0) for sequence in sequences]
    assert_equal([table[0] for table in tables], tables[0][:1] * 3, "first blocks, which are shared")
    assert_equal(len({table[1] for table in tables}), 3, f"different second blocks, of which two are copied, in {tables}")
    assert_equal(served.match([*tokens, OTHER]), 2 * size, "match of the whole prompt while its last block was copied")


@check("PREFIX-19d", "prefix")
def begin_counts_the_copy_as_needed(subject: Subject) -> None:
    need_token_hits(subject)
    subject.require_size(sequences=3)
    for entries in (1, 2):  # after the full block of the hit
        served = with_free_entries(subject, 2 + entries)
        size, tokens, cache = served.size, prompt(2 * served.size), served.cache
        first = served.serve(tokens)  # lists the source
        longer = [*tokens[:-1], *prompt(1 + (entries - 1) * size, 2)]
        with raises("OutOfBlocks"):
            served.begin([*longer, *prompt(1, 3)])
        served.look()
        assert_equal(cache.num_free_blocks, entries * len(served.layers), "free blocks after begin raised OutOfBlocks")
        sequence, hit = served.begin(longer)
        assert_equal(hit, 2 * size - 1, "the hit of a prompt that needs every free block")
        assert_equal(cache.num_free_blocks, 0, "free blocks after begin of a prompt that needs all of them")
        served.look()
        cache.drop(sequence)
        assert_equal(
            cache.num_free_blocks, entries * len(served.layers), "free blocks after drop of a sequence with a copied block"
        )
        cache.drop(first)
        cache.reset()  # raises InUse if a failed begin left a sequence


@check("PREFIX-19d", "prefix")
def begin_copies_a_source_that_it_evicts(subject: Subject) -> None:
    need_token_hits(subject)
    for shared, entries in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3)):  # full blocks of the hit; entries of the pool
        served = with_free_entries(subject, entries)
        size, tokens = served.size, prompt((1 + shared) * served.size)
        for at in range((1 + shared) * size - 1, shared * size, -1):
            served.serve_and_drop(tokens)
            longer = [*tokens[:at], *prompt(entries * size - at, 90 + at)]
            if not subject.limits.switch(subject.family, "other_eviction_order"):
                assert_equal(served.match(longer), at, "match of a prompt that needs all blocks, also that of its last tokens")
            sequence, hit = served.begin(longer)
            served.look()
            served.compare(sequence, hit)
            assert_equal(served.cache.num_free_blocks, 0, "free blocks after begin evicted the block that it copied")
            served.write(sequence, hit, len(longer))
            served.compare(sequence, len(longer))
            assert_equal(served.match([*tokens, OTHER]), shared * size, "match of the prompt whose last block was evicted")
            served.cache.drop(sequence)


@check("PREFIX-19e", "prefix")
def copies_keep_the_eviction_order(subject: Subject) -> None:
    need_token_hits(subject)
    need_declared_order(subject)
    subject.require_size(sequences=2)
    for fits in (True, False):
        served = with_free_entries(subject, 4)
        size = served.size
        prompts = [prompt(size, which) for which in (1, 2, 3)]
        served.serve_and_drop(*prompts)
        if fits:
            sequence, hit = served.begin([*prompts[0][:-1], OTHER])
            assert_equal(hit, size - 1, "the hit of a prompt with another last token")
            served.cache.drop(sequence)
        else:
            free = served.cache.num_free_blocks
            with raises("OutOfBlocks"):
                served.begin([*prompts[0][:-1], *prompt(4 * size, 4)])
            assert_equal(served.cache.num_free_blocks, free, "free blocks after begin raised OutOfBlocks")
            assert_equal(served.match(prompts[0]), size - 1, "match after begin raised OutOfBlocks")
        evict_one_by_one(served, prompts, [1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 0])


@check("PREFIX-19f", "prefix")
def copied_tokens_read_with_their_scales(subject: Subject) -> None:
    need_token_hits(subject)
    for name in of_each_kind(subject, PLACES):
        served = PrefixFixture(subject, **of_format(name))
        tokens = prompt(2 * served.size)
        first = served.serve(tokens)
        for at in range(2 * served.size - 1, served.size, -1):
            sequence, hit = served.begin(differing(tokens, at))
            assert_equal(hit, at, f"the hit of a prompt in {name}")
            want = tuple(part[:at] for part in served.cache.gather(first, 0))
            assert_pair(served.cache.gather(sequence, 0), want, f"{at} found tokens in {name}, compared with the committed ones")
            served.write(sequence, at, 2 * served.size)
            served.look()
            served.cache.drop(sequence)


@check("PREFIX-19g", "prefix")
def match_finds_no_block_after_the_source(subject: Subject) -> None:
    need_token_hits(subject)
    served = PrefixFixture(subject, 24)
    size = served.size
    a, b, c = (prompt(size, which) for which in (1, 2, 3))
    live = served.make_cached([*a, *b, *c])
    for at in range(1, size):
        other = differing(b, at)
        served.finds([*a, *other, *c, OTHER], size + at)
    served.finds([*a, *b], 2 * size - 1)
    longer = [*a, *differing(b, size - 1), *c]
    sequence, hit = served.begin(longer)
    served.write(sequence, hit, 2 * size)
    served.cache.commit(sequence, longer[: 2 * size])
    assert_equal(served.match([*longer, OTHER]), 2 * size, "match after a copied block was filled and committed")
    for each in (*live, sequence):
        served.cache.drop(each)
