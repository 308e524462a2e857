"""Checks of PREFIX: which blocks are found."""

from contextlib import suppress
from itertools import product
from typing import Any

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.paged.checks_formats import PLACES, of_each_kind, of_format
from kvref_conformance.families.paged.fixture import need_tokens, room, tables_alone
from kvref_conformance.families.prefix.fixture import (
    OTHER,
    PrefixFixture,
    has_token_hits,
    need_declared_order,
    prompt,
    with_free_entries,
)
from kvref_conformance.testlib.assertions import (
    assert_equal,
    assert_pair,
    assert_true,
    assert_within,
    default_scale,
    expected_attention,
    raises,
    random_queries,
)
from kvref_conformance.testlib.fixtures import block_table_of
from kvref_conformance.testlib.integer_types import INTEGER_TYPES
from kvref_conformance.testlib.production_sizes import affordable_tokens
from kvref_conformance.testlib.registry import check, share_checks


@check("PREFIX-01ab", "prefix")
def match_finds_full_blocks_only(subject: Subject) -> None:
    subject.require_size(sequences=2)
    for size in dict.fromkeys(subject.size("block_size", wanted) for wanted in (1, 2, 3, 4, 16)):
        served = PrefixFixture(subject, block_size=size)
        size, tokens = served.size, prompt(3 * served.size + 1)
        served.serve(tokens)
        for count in dict.fromkeys((0, 1, size - 1, size, size + 1, 2 * size, 2 * size + 1, 3 * size, 3 * size + 1)):
            if count or not tables_alone(subject):
                served.finds(tokens[:count], served.hit(min(max(0, count - 1), 3 * size)))
        served.finds([*tokens, OTHER], len(tokens) // size * size)


@check("PREFIX-01ab", "prefix")
def begin_leaves_at_least_one_token(subject: Subject) -> None:
    served = PrefixFixture(subject)
    for blocks in (1, 2, 3):
        tokens = prompt(blocks * served.size, blocks)
        served.make_cached(tokens)
        served.finds(tokens, served.hit(blocks * served.size - 1))


@check("PREFIX-01c", "prefix")
def begin_allocates_blocks_for_all_tokens(subject: Subject) -> None:
    need_declared_order(subject)
    served = PrefixFixture(subject)
    cache, size = served.cache, served.size
    served.make_cached(prompt(2 * size))
    for tokens, entries in ((prompt(2 * size + 1), 3), (prompt(4 * size), 4), (prompt(size + 1, 2), 2), ([], 0)):
        if not tokens and tables_alone(subject):
            continue
        sequence, hit = served.begin(tokens)
        free = cache.config["num_blocks"] - len(served.layers) * entries
        assert_equal(cache.num_free_blocks, free, f"free blocks after begin with {len(tokens)} tokens, {hit} of them cached")
        served.write(sequence, hit, len(tokens))
        assert_equal(cache.num_free_blocks, free, "free blocks after a write of the tokens after the hit")
        served.look()
        cache.drop(sequence)


@check("PREFIX-01ab", "prefix")
def match_finds_the_common_blocks_of_prompts(subject: Subject) -> None:
    served = PrefixFixture(subject, 16)
    size, tokens = served.size, prompt(3 * served.size)
    longer, branch = [*tokens[: 2 * size], *prompt(size, 2)], [*tokens[:size], *prompt(size, 3)]
    served.make_cached(tokens, longer, branch)
    for each, blocks in ((tokens, 3), (longer, 3), (branch, 2), ([*tokens[: 2 * size], *prompt(size, 4)], 2)):
        served.finds([*each, OTHER], blocks * size)


@check("PREFIX-02ab", "prefix")
def commit_past_the_end_of_a_layer_raises(subject: Subject) -> None:
    need_tokens(subject)
    served = PrefixFixture(subject)
    tokens, size = prompt(2 * served.size + 1), served.size
    sequence, _ = served.begin(tokens)
    with raises("PositionOutOfRange"):
        served.cache.commit(sequence, tokens[:1])
    for layer in served.layers:  # during a step the first layers are ahead
        served.write(sequence, 0, 2 * size if layer == 0 else size + 1, layers=[layer])
    written = 2 * size if len(served.layers) == 1 else size + 1
    with raises("PositionOutOfRange"):
        served.cache.commit(sequence, tokens[: written + 1])
    assert_equal(served.match(tokens), 0, "match after a rejected commit")
    served.cache.commit(sequence, tokens[:written])
    served.finds(tokens, written // size * size)


@check("PREFIX-02c", "prefix")
def commit_of_other_tokens_raises(subject: Subject) -> None:
    for partly in (0, 1):  # tokens missing in the last block
        served = PrefixFixture(subject)
        size, tokens = served.size, prompt(3 * served.size)
        count = 2 * size - partly
        first = served.serve(tokens[:count])
        served.cache.commit(first, tokens[:1])
        served.cache.commit(first, tokens[:count])
        lengths = {first: count}
        with suppress(NotOffered):
            subject.require_size(sequences=2)
            sequence, hit = served.begin(tokens)
            lengths[sequence] = hit
        for sequence, length in lengths.items():
            for at in {0, size - 1, length - 1} & {*range(length)}:
                with raises("TokenMismatch"):
                    served.cache.commit(sequence, [*tokens[:at], OTHER, *tokens[at + 1 : length]])
            served.cache.commit(sequence, tokens[:length])
        for sequence in [*lengths][1:]:
            served.cache.drop(sequence)
        assert_equal(served.match([OTHER, *tokens[1:]]), 0, "match of the tokens of a rejected commit")
        served.finds(tokens, count // size * size)


@check("PREFIX-02a", "prefix")
def commit_can_be_repeated_with_more_tokens(subject: Subject) -> None:
    subject.require_size(sequences=2)
    served = PrefixFixture(subject)
    tokens = prompt(3 * served.size + 1)
    sequence, _ = served.begin(tokens)
    for count in range(len(tokens)):
        served.write(sequence, count, count + 1)
        served.cache.commit(sequence, tokens[: count + 1])
        hit = min((count + 1) // served.size, 3) * served.size
        assert_equal(served.match(tokens), hit, f"match after commit of {count + 1} tokens")
    served.finds(tokens, 3 * served.size)


@check("PREFIX-02acd", "prefix")
def overwritten_tokens_can_be_committed_again(subject: Subject) -> None:
    need_tokens(subject)
    subject.require_size(sequences=2)
    served = PrefixFixture(subject)
    size, tokens = served.size, prompt(2 * served.size)
    start = size + 1 if size > 1 else 1
    again = [*tokens[:start], *prompt(2 * size - start, 2)]
    sequence = served.serve(tokens)
    with raises("TokenMismatch"):
        served.cache.commit(sequence, again)
    served.prompts[sequence] = again, ""
    served.write(sequence, start, 2 * size)
    served.cache.commit(sequence, again)
    with suppress(NotOffered):
        need_declared_order(subject)
        assert_equal(served.match([*tokens, OTHER]), 2 * size, "match of the overwritten prompt")
    served.finds([*again, OTHER], 2 * size)


@check("PREFIX-02d", "prefix")
def overwrite_in_one_layer_uncommits_tokens(subject: Subject) -> None:
    need_tokens(subject)
    subject.require_size(num_layers=2, sequences=2)
    for layer in (0, 1):
        served = PrefixFixture(subject)
        size, tokens = served.size, prompt(2 * served.size)
        other = [*tokens[:size], *prompt(size, 2)]
        sequence = served.serve(tokens)
        served.prompts[sequence] = other, ""
        served.write(sequence, size, 2 * size, layers=[layer])
        served.cache.commit(sequence, other)  # no TokenMismatch


@check("PREFIX-02acd", "prefix")
def sharers_commit_independently(subject: Subject) -> None:
    """One sharer edits and commits its tokens. The committed tokens of the other, and what it commits later, do not change."""
    need_tokens(subject)
    subject.require_size(sequences=3)
    for edit, editor in product(("append", "write", "truncate", "remove"), (0, 1)):
        served = PrefixFixture(subject, 16)
        size, tokens, cache = served.size, prompt(2 * served.size), served.cache
        parent = served.serve(tokens)
        sharers = parent, cache.fork(parent)
        one, other = sharers[editor], sharers[1 - editor]
        start = 2 * size if edit == "append" else size
        served.prompts[one], served.prompts[other] = (([*tokens[:start], *prompt(3 * size - start, n)], "") for n in (2, 3))
        with suppress(NotOffered):
            if edit == "truncate":
                cache.truncate(one, start)
            elif edit == "remove":
                cache.remove(one, start, 2 * size)
            served.write(one, start, 3 * size)
            cache.commit(one, served.prompts[one][0])
            with raises("TokenMismatch"):
                cache.commit(other, [*tokens[:-1], OTHER])
            served.prompts[other] = [*tokens, *prompt(size, 3)], ""
            served.write(other, 2 * size, 3 * size)
            cache.commit(other, served.prompts[other][0])
            for each in sharers:
                what = f"match of the prompt of the {('parent', 'fork')[each != parent]}, after {edit} by the other or itself"
                assert_equal(served.match([*served.prompts[each][0], OTHER]), 3 * size, what)
            served.look()


@check("PREFIX-02ad", "prefix")
def loaded_tokens_can_be_committed(subject: Subject) -> None:
    """A sequence with committed tokens loads a file. Its former tokens are no longer committed (MOVE-01)."""
    need_tokens(subject)
    subject.require_size(sequences=3)
    for count in (1, 2, 3):  # blocks of the file
        served = PrefixFixture(subject, 16)
        size, tokens, cache = served.size, prompt(2 * served.size), served.cache
        sequence, (other, _) = served.serve(tokens), served.begin(prompt(count * size, 2))
        served.write(other, 0, count * size)
        cache.load(sequence, cache.save(other))
        cache.commit(sequence, prompt(count * size, 2))
        served.prompts[sequence] = served.prompts[other]
        served.compare(sequence, count * size)
        assert_equal(served.match([*prompt(count * size, 2), OTHER]), count * size, "match of loaded tokens after commit")


@check("PREFIX-02ad", "prefix")
def truncated_tokens_can_be_committed_again(subject: Subject) -> None:
    subject.require_size(sequences=2)
    size = PrefixFixture(subject).size
    for length in dict.fromkeys((0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size)):
        served = PrefixFixture(subject, 16)
        old = prompt(3 * size)
        new = [*old[:length], *prompt(3 * size - length, 2)]
        sequence = served.serve(old)
        served.cache.truncate(sequence, length)
        served.prompts[sequence] = new, ""
        served.write(sequence, length, len(new))
        served.cache.commit(sequence, new)
        served.finds([*new, OTHER], len(new))
        served.begin([*old, OTHER])  # the old blocks can still be cached
        served.look()


@check("PREFIX-03a", "prefix")
def match_stops_at_the_first_other_token(subject: Subject) -> None:
    served = PrefixFixture(subject)
    tokens = prompt(3 * served.size)
    served.make_cached(tokens)
    for at in range(len(tokens)):
        served.finds([*tokens[:at], OTHER, *tokens[at + 1 :], OTHER], served.hit(at))


@check("PREFIX-03a", "prefix")
def block_is_found_after_its_own_prefix_only(subject: Subject) -> None:
    served = PrefixFixture(subject, 16)
    a, b, c = (prompt(served.size, which) for which in (1, 2, 3))
    served.make_cached([*a, *b], [*c, *a])
    for blocks, count in (([b], 0), ([a, a], 1), ([b, a], 0), ([c, b], 1), ([a, b, a], 2), ([c, a, b], 2)):
        served.finds([*(token for block in blocks for token in block), OTHER], count * served.size)


@check("PREFIX-03a", "prefix")
def salt_separates_equal_prompts(subject: Subject) -> None:
    long = "tenant-0123456789abcdef/adapter-0123456789abcdef/"
    for salts, others in (
        (("", "a", "b"), ("A", "ab", "a ", "0", "é")),
        ((f"{long}1",), (f"{long}2", long, f"T{long[1:]}1", f"{long}1 ", f"{long[-8:]}1")),
    ):
        served = PrefixFixture(subject, 16)
        tokens, size = prompt(2 * served.size), served.size
        for salt in salts:
            assert_equal(served.match([*tokens, OTHER], salt), 0, f"match with the salt {salt!r} before its first use")
            served.make_cached(tokens, salt=salt)
            served.finds([*tokens, OTHER], 2 * size, salt)
        for salt in others:
            served.finds([*tokens, OTHER], 0, salt)


@check("PREFIX-03b", "prefix")
def match_separates_prompts_with_equal_weak_hashes(subject: Subject) -> None:
    """Prompts that collide under sums, exclusive ors, polynomials, Python's hash (modulo 2^61 - 1) or narrower integers."""
    served = PrefixFixture(subject, 40)
    size = served.size
    last = [(5, 5 + 2**8), (5, 5 + 2**16), (5, 5 + 2**31), (5, 5 + 2**32), (2**52, 2**52 + 1)]
    if not subject.by_value:  # some JSON readers have no larger numbers
        last += [(5, 5 + 2**61 - 1), (2**60, 2**60 + 1), (2**62, 2**62 + 2**32), (2**63 - 1, 2**63 - 2), (0, 2**61 - 1)]
    pairs = [([*prompt(size - 1), first], [*prompt(size - 1), second]) for first, second in last]
    if size > 1:
        rest = prompt(size - 2)
        twos = (((3, 9), (9, 3)), ((3, 9), (4, 8)), ((3, 9), (2, 8)), ((1, 0), (0, 31)), ((1, 23), (12, 3)), ((7, 7), (8, 8)))
        pairs += [([*first, *rest], [*second, *rest]) for first, second in twos]
    for committed, other in pairs:
        if has_token_hits(subject):
            served = PrefixFixture(subject, 40)  # in which the blocks of earlier pairs are not found
        live = served.make_cached(committed)
        served.finds([*other, OTHER], served.hit([a == b for a, b in zip(committed, other, strict=True)].index(False)))
        served.finds([*committed, OTHER], size)
        for sequence in live:
            served.cache.drop(sequence)


PAGE = 256  # tokens per block: the default of transformers
# A first block of 224 ones, either five of these tokens, and 27 ones. Both blocks have the 64-bit BLAKE2b hash 0x2ee99e83f5615a8a
# (over int32). The search for them took eight minutes on one core.
COLLIDING = [7232, 6294, 7679, 2095, 839], [7821, 5009, 4025, 7586, 128]


@check("PREFIX-03b", "prefix")
def match_separates_blocks_with_equal_64_bit_hashes(subject: Subject) -> None:
    served = PrefixFixture(subject, 4, block_size=PAGE)
    if served.size != PAGE:
        raise NotOffered(f"blocks of {PAGE} tokens, where its limits say {subject.limits.limit(subject.family, 'block_size')}")
    committed, other = ([*[1] * 224, *five, *[1] * 27] for five in COLLIDING)
    served.make_cached(committed)
    served.finds([*other, 1], served.hit(224))
    served.finds([*committed, 1], PAGE)


@check("PREFIX-03ac", "prefix")
def commit_uses_the_salt_of_its_sequence(subject: Subject) -> None:
    subject.require_size(sequences=3)
    served = PrefixFixture(subject, 16)
    size = served.size
    sequences = [served.begin(prompt(2 * size, which), salt)[0] for which, salt in ((1, "a"), (2, "b"))]
    for sequence in sequences:
        served.write(sequence, 0, 2 * size)
        served.cache.commit(sequence, served.prompts[sequence][0])
    for sequence in sequences:
        tokens, own, *_ = served.prompts[sequence]
        for salt in ("", "a", "b"):
            served.finds([*tokens, OTHER], 2 * size * (salt == own), salt)


@check("PREFIX-03c", "prefix")
def fork_has_the_salt_of_its_parent(subject: Subject) -> None:
    subject.require_size(sequences=3)
    for short in (1, 0):  # second: without a full block, only the salt is inherited
        served = PrefixFixture(subject, 16)
        size, tokens = served.size, prompt(2 * served.size)
        parent, count = served.begin(tokens, "a")[0], size - short
        served.write(parent, 0, count)
        served.cache.commit(parent, tokens[:count])
        child = served.cache.fork(parent)
        served.prompts[child] = tokens, "a"
        served.write(child, count, 2 * size)
        served.cache.commit(child, tokens)
        served.finds([*tokens, OTHER], 2 * size, "a")
        served.finds([*tokens, OTHER], 0)


@check("PREFIX-04a", "prefix")
def match_ignores_partly_filled_blocks(subject: Subject) -> None:
    subject.require_size(sequences=2)
    served = PrefixFixture(subject)
    if served.size == 1:
        raise NotOffered("a partly filled block, where its limits say block_size 1")
    size, tokens = served.size, prompt(2 * served.size - 1)
    served.serve(tokens)
    for more in ([], [OTHER], [tokens[-1] + 1, OTHER], [0] * size, [tokens[-1]] * size):  # possible ways to pad the block
        served.finds([*tokens, *more], size)


@check("PREFIX-04b", "prefix")
def match_ignores_uncommitted_tokens(subject: Subject) -> None:
    subject.require_size(sequences=2)
    served = PrefixFixture(subject)
    size, tokens = served.size, prompt(3 * served.size + 1)
    sequence, _ = served.begin(tokens)
    assert_equal(served.match(tokens), 0, "match before the tokens are written")
    served.write(sequence, 0, len(tokens))
    assert_equal(served.match(tokens), 0, "match of written tokens without commit")
    for count in (size - 1, size, 2 * size - 1, 2 * size):
        served.cache.commit(sequence, tokens[:count])
        served.finds(tokens, count // size * size)
    served.cache.drop(sequence)
    served.finds(tokens, 2 * size)


@check("PREFIX-04c", "prefix")
def commit_adds_no_block_that_release_before_freed(subject: Subject) -> None:
    need_tokens(subject)
    for counts in ((1, 2, 4), (4,), (3, 4)):  # in blocks
        served = PrefixFixture(subject)
        size, tokens = served.size, prompt(4 * served.size)
        sequence, _ = served.begin(tokens)
        served.write(sequence, 0, len(tokens))
        served.cache.release_before(sequence, 2 * size)
        for count in counts:
            served.cache.commit(sequence, tokens[: count * size])
            what = f"match after commit of {count * size} tokens, of which {2 * size} are released"
            assert_equal(served.match([*tokens, OTHER]), 0, what)


@check("PREFIX-12a", "prefix")
def hit_reads_as_a_miss(subject: Subject) -> None:
    need_tokens(subject)
    served = PrefixFixture(subject, 24)
    size, tokens = served.size, prompt(3 * served.size + 1)
    for _ in range(3):
        for count in (len(tokens), 2 * size, 2 * size + 1):
            sequence = served.serve(tokens[:count])
            served.look("length")
            served.compare(sequence, count)
            served.cache.drop(sequence)


@check("PREFIX-12b", "prefix")
def hit_attends_as_a_miss(subject: Subject) -> None:
    served = PrefixFixture(subject, 24)
    tokens, query, scale = prompt(2 * served.size + 1), random_queries(subject, 1), default_scale(subject)
    for prefix in ("no hit", "a hit"):
        sequence = served.serve(tokens)
        for layer in served.layers:
            want, bound = expected_attention(subject, query, *served.compute(sequence, layer, range(len(tokens))), scale=scale)
            got = served.cache.attend(sequence, layer, query, scale)
            assert_within(got, want, bound, f"attention in layer {layer} with {prefix}")
        served.cache.drop(sequence)


@check("PREFIX-15b", "prefix")
def invalid_tokens_raise(subject: Subject) -> None:
    served = PrefixFixture(subject)
    tokens, cache = prompt(served.size), served.cache
    served.serve(tokens)
    sequence, hit = served.begin(prompt(served.size, 2))
    served.write(sequence, hit, served.size)  # not committed, so that a commit contradicts no earlier one
    free = cache.num_free_blocks
    for wrong in [*subject.integers(-1), *([] if subject.by_value else [2**63, 2**64])]:
        for name, arguments in (("match", ([*tokens, wrong],)), ("begin", ([wrong, *tokens],)), ("commit", (sequence, [wrong]))):
            with raises("TokenOutOfRange"):
                getattr(cache, name)(*arguments)
    assert_equal(cache.num_free_blocks, free, "free blocks after rejected tokens")
    served.finds([*tokens, OTHER], served.size)


@check("PREFIX-15a", "prefix")
def tokens_of_any_integer_type_are_found(subject: Subject) -> None:
    subject.require_same_process("integers of NumPy's types")
    subject.require_size(sequences=2)
    served = PrefixFixture(subject, 40)
    for number, written_as in enumerate((int, *INTEGER_TYPES)):
        tokens = [(7 * number + position) % 100 for position in range(2 * served.size)]
        typed: list[Any] = [written_as(token) for token in tokens]
        sequence, _ = served.begin(typed)
        served.write(sequence, 0, len(tokens))
        served.cache.commit(sequence, typed)
        for read_as in (int, *INTEGER_TYPES):
            wanted: list[Any] = [read_as(token) for token in (*tokens, OTHER)]
            what = f"match of tokens of type {read_as.__name__}, committed as {written_as.__name__}"
            got = served.cache.match(wanted)
            assert_equal(got, 2 * served.size, what)
            assert_true(type(got) is int, what, "an integer", type(got))
        served.cache.drop(sequence)


# Checks of PREFIX-16: hits in formats with scales.


@check("PREFIX-16a", "prefix")
def hit_reads_the_committed_bits(subject: Subject) -> None:
    subject.require_size(sequences=2)
    for name in of_each_kind(subject, PLACES):
        served = PrefixFixture(subject, **of_format(name))
        tokens = prompt(2 * served.size + 1)
        hit, first = len(tokens) // served.size * served.size, served.serve(tokens)
        keys, values = (part[:hit] for part in served.cache.gather(first, 0))
        if not subject.limits.switch(subject.family, "other_eviction_order"):  # then it is found after drop
            served.cache.drop(first)
            served.serve_and_drop(prompt(served.size + 1, 2))
        sequence, length = served.begin([*tokens, 1])
        assert_equal(length, hit, f"length of a sequence that begins with a hit in {name}")
        assert_pair(served.cache.gather(sequence, 0), (keys, values), f"the hit in {name}, compared with the committed tokens")


@check("PREFIX-16b", "prefix")
def reused_blocks_read_with_their_new_scales(subject: Subject) -> None:
    for name in of_each_kind(subject, PLACES):
        served = with_free_entries(subject, 3, **of_format(name))
        first, second = prompt(2 * served.size + 1), prompt(3 * served.size, 2)
        for tokens in (first, second, first):  # each needs almost every block
            sequence = served.serve(tokens)
            served.look()
            served.cache.drop(sequence)


# Registers the checks of the paged cache for prefix caches too, except those of LAW-18.

share_checks("prefix", "paged", but=("LAW-18",))


# Checks of LAW-18: prefixes at the sizes of serving.

LONG = 4096  # tokens of a system prompt


def serving(subject: Subject, entries: int, **sizes: Any) -> PrefixFixture:
    wanted = {"block_size": 16, "num_layers": 1, "num_kv_heads": 1, "head_dim": 64} | sizes
    served = PrefixFixture(subject, entries if subject.size("num_blocks", entries) >= entries else 1, **wanted)
    if room(served.cache) < 8:
        raise NotOffered(f"blocks for 8 entries, where its limits say {subject.limits.limit(subject.family, 'num_blocks')}")
    served.stop_judging()
    return served


@check("LAW-18", "prefix")
def begin_shares_a_long_prefix_with_hundreds_of_sequences(subject: Subject) -> None:
    subject.require_size(sequences=2)
    served = serving(subject, LONG // 16 + 300)
    entries = min(LONG // served.size, room(served.cache) // 2)
    tokens = prompt(affordable_tokens(subject, entries * served.size) // served.size * served.size)
    if not tokens:
        raise NotOffered("room for a prefix of at least one block")
    first = served.serve(tokens)
    free, layers = served.cache.num_free_blocks, len(served.layers)
    table = block_table_of(served.cache, first, 0) if tables_alone(subject) else []
    count = min(subject.size("sequences", 250) - 1, free // layers)
    sequences = []
    for which in range(count):
        sequence, hit = served.begin([*tokens, 2_000_000 + which])
        assert_equal(hit, len(tokens), f"the hit of sequence {which} with a shared prefix")
        served.write(sequence, hit, hit + 1)
        sequences.append(sequence)
    assert_equal(served.cache.num_free_blocks, free - count * layers, f"free blocks after begin of {count} sequences")
    served.cache.drop(first)
    for sequence in sequences[:: max(1, count // 4)]:
        served.compare(sequence, len(tokens) + 1)
    for sequence in sequences:
        if tables_alone(subject):
            assert_equal(block_table_of(served.cache, sequence, 0)[: len(table)], table, "blocks of a shared prefix")
        else:
            ends = [0, len(tokens) - 1, len(tokens)]
            assert_pair(served.cache.read(sequence, 0, ends), served.compute(sequence, 0, ends), "first and last tokens")
        served.cache.drop(sequence)
    assert_equal(served.match([*tokens, 0]), len(tokens), "match of a prefix after drop of all sequences")


@check("LAW-18", "prefix")
def match_finds_thousands_of_blocks_until_they_are_evicted(subject: Subject) -> None:
    need_declared_order(subject)
    served = serving(subject, 2048, head_dim=8)
    whole, size, layers = room(served.cache), served.size, len(served.layers)
    rows = max(1, affordable_tokens(subject, 4 * size) // size)  # blocks per prompt
    prompts = [prompt(rows * size, 10 + which) for which in range(min(whole // rows, affordable_tokens(subject, 500)))]
    served.serve_and_drop(*prompts)
    assert_equal(served.count_cached(*prompts), [rows] * len(prompts), "cached blocks of prompts that fill the pool")
    half = len(prompts) // 2
    filler = served.allocate(whole - rows * (len(prompts) - half))
    evicted = [0] * half + [rows] * (len(prompts) - half)
    assert_equal(served.count_cached(*prompts), evicted, "cached blocks of prompts after half of them were evicted")
    for tokens in prompts[half :: max(1, len(prompts) // 8)]:
        sequence, hit = served.begin(tokens)
        assert_equal(hit, served.hit(rows * size - 1), "the hit of a cached prompt")
        served.compare(sequence, hit)
        served.cache.drop(sequence)
    served.cache.drop(filler)
    free = served.cache.num_free_blocks
    assert_true(free >= whole * layers, "free blocks without live sequences", f"at least {whole * layers}", free)


@check("LAW-18", "prefix")
def begin_separates_hundreds_of_salts(subject: Subject) -> None:
    begin_with_salts(subject, 300)


@check("LAW-18", "prefix", real=True)
def begin_separates_thousands_of_salts(subject: Subject) -> None:
    begin_with_salts(subject, 5000)


def begin_with_salts(subject: Subject, count: int) -> None:
    """Checks that a prompt with a new salt has no hit, and that all salts are then found."""
    need_declared_order(subject)
    served = serving(subject, count + 8, block_size=1, head_dim=8)
    tokens = prompt(served.size)
    salts = [f"tenant-{number}" for number in range(affordable_tokens(subject, min(count, room(served.cache) - 8)))]
    for salt in salts:
        sequence, hit = served.begin([*tokens, OTHER], salt)
        assert_equal(hit, 0, f"the hit with the salt {salt!r} before its first use")
        served.write(sequence, 0, len(tokens))
        served.cache.commit(sequence, tokens)
        served.cache.drop(sequence)
    for salt in salts[::29]:
        assert_equal(served.match([*tokens, OTHER], salt), len(tokens), f"match with the salt {salt!r}, one of {len(salts)}")


@check("LAW-18", "prefix", real=True)
def begin_serves_a_thousand_prompts(subject: Subject) -> None:
    """The hits depend on the order of eviction, but must be right in any order."""
    served = serving(subject, 1024, num_layers=2, head_dim=32)
    longest = min(40 * served.size, room(served.cache) * served.size // 4)
    for round in range(affordable_tokens(subject, 1000, longest)):
        branch, cut = int(subject.rng.integers(1, 40)), int(subject.rng.integers(1, longest))
        tokens = [*prompt(cut // 2, 1 + branch % 5), *prompt(cut - cut // 2, 10 + branch)]
        sequence, hit = served.begin(tokens)
        if round % 10 == 0:
            served.compare(sequence, hit)
        served.write(sequence, hit, cut)
        served.cache.commit(sequence, tokens)
        if round % 50 == 0:
            served.compare(sequence, cut)
        served.cache.drop(sequence)
    assert_equal(served.cache.num_free_blocks, served.cache.config["num_blocks"], "free blocks without live sequences")
