"""Checks of PREFIX: which blocks are found."""

from contextlib import suppress
from typing import Any

from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.paged.block_accounting import need_tokens, room, tables_alone
from kvref_conformance.families.paged.checks_formats import PLACES, of_each_kind, of_format
from kvref_conformance.families.prefix.fixture import PrefixFixture, declared_order, exactly, prompt
from kvref_conformance.outcome import NotOffered
from kvref_conformance.testlib.assertions import (
    assert_equal,
    assert_pair,
    assert_within,
    default_scale,
    expected_attention,
    queries,
    raises,
    true,
)
from kvref_conformance.testlib.integer_types import TYPES
from kvref_conformance.testlib.production_sizes import affordable
from kvref_conformance.testlib.registry import asked_of, check

OTHER = 77  # a token that is in no prompt


@check("PREFIX-01ab", "prefix")
def hits_end_where_blocks_do(subject: Subject) -> None:
    subject.need(sequences=2)
    for size in dict.fromkeys(subject.size("block_size", wanted) for wanted in (1, 2, 3, 4, 16)):
        served = PrefixFixture(subject, block_size=size)
        size, tokens = served.size, prompt(3 * served.size + 1)
        served.serve(tokens)
        for count in dict.fromkeys((0, 1, size - 1, size, size + 1, 2 * size, 2 * size + 1, 3 * size, 3 * size + 1)):
            if count or not tables_alone(subject):
                served.finds(tokens[:count], max(0, count - 1) // size * size, f"a prompt of {count} tokens in blocks of {size}")
        served.finds([*tokens, OTHER], len(tokens) // size * size, "a prompt that continues after the committed tokens")


@check("PREFIX-01ab", "prefix")
def one_token_is_always_left(subject: Subject) -> None:
    served = PrefixFixture(subject)
    for blocks in (1, 2, 3):
        tokens = prompt(blocks * served.size, blocks)
        served.there(tokens)
        served.finds(tokens, (blocks - 1) * served.size, f"a prompt of {blocks} full blocks, all of them cached")


@check("PREFIX-01c", "prefix")
def what_begins_has_room_for_all_its_tokens(subject: Subject) -> None:
    declared_order(subject)
    served = PrefixFixture(subject)
    cache, size, layers = served.cache, served.size, len(served.layers)
    served.there(prompt(2 * size))
    for tokens in (prompt(2 * size + 1), prompt(4 * size), prompt(size + 1, 2), []):
        if not tokens and tables_alone(subject):
            continue
        sequence, hit = served.begin(tokens)
        entries = -(-len(tokens) // size)
        what = f"free blocks after begin with {len(tokens)} tokens, of which {hit} were cached"
        assert_equal(cache.num_free_blocks, cache.config["num_blocks"] - layers * entries, what)
        served.write(sequence, hit, len(tokens))
        assert_equal(cache.num_free_blocks, cache.config["num_blocks"] - layers * entries, f"{what}, and a write of the others")
        served.look(sequence, len(tokens), "a sequence whose tokens after the hit were written")
        cache.drop(sequence)


@check("PREFIX-01ab", "prefix")
def prompts_share_as_much_as_they_have_in_common(subject: Subject) -> None:
    served = PrefixFixture(subject, 16)
    size, tokens = served.size, prompt(3 * served.size)
    longer, branch = [*tokens[: 2 * size], *prompt(size, 2)], [*tokens[:size], *prompt(size, 3)]
    served.there(tokens, longer, branch)
    for each, blocks in ((tokens, 3), (longer, 3), (branch, 2), ([*tokens[: 2 * size], *prompt(size, 4)], 2)):
        served.finds([*each, OTHER], blocks * size, f"a prompt of which {blocks} blocks are cached")


@check("PREFIX-02ab", "prefix")
def only_what_every_layer_has_can_be_committed(subject: Subject) -> None:
    need_tokens(subject)
    served = PrefixFixture(subject)
    tokens, size = prompt(2 * served.size + 1), served.size
    sequence, _ = served.begin(tokens)
    with raises("PositionOutOfRange"):
        served.cache.commit(sequence, tokens[:1])
    for layer in served.layers:
        stop = 2 * size if layer == 0 else size + 1  # during a step the first layers are ahead
        served.write(sequence, 0, stop, layers=[layer])
    written = 2 * size if len(served.layers) == 1 else size + 1
    with raises("PositionOutOfRange"):
        served.cache.commit(sequence, tokens[: written + 1])
    assert_equal(served.match(tokens), 0, "match after a rejected commit")
    served.cache.commit(sequence, tokens[:written])
    served.finds(tokens, written // size * size, f"a prompt of which {written} tokens were committed")


@check("PREFIX-02c", "prefix")
def commits_must_agree(subject: Subject) -> None:
    served = PrefixFixture(subject)
    size, tokens = served.size, prompt(3 * served.size)
    first = served.serve(tokens[: 2 * size])
    served.cache.commit(first, tokens[:1])
    served.cache.commit(first, tokens[: 2 * size])
    sequences = [(first, 2 * size)]
    with suppress(NotOffered):
        subject.need(sequences=2)
        sequences.append((served.begin(tokens)[0], 2 * size))
    for sequence, known in sequences:
        for at in (0, size - 1, known - 1):
            with raises("TokenMismatch"):
                served.cache.commit(sequence, [*tokens[:at], OTHER, *tokens[at + 1 : known]])
    for sequence, _ in sequences[1:]:
        served.cache.drop(sequence)
    assert_equal(served.match([OTHER, *tokens[1:]]), 0, "match of the tokens of a rejected commit")
    served.finds(tokens, 2 * size, "the prompt that was committed before")


@check("PREFIX-02a", "prefix")
def commits_may_come_piece_by_piece(subject: Subject) -> None:
    subject.need(sequences=2)
    served = PrefixFixture(subject)
    tokens = prompt(3 * served.size + 1)
    sequence, _ = served.begin(tokens)
    for count in range(len(tokens)):
        served.write(sequence, count, count + 1)
        served.cache.commit(sequence, tokens[: count + 1])
        found = (count + 1) // served.size * served.size
        assert_equal(served.match(tokens), found, f"match after {count + 1} tokens were committed one at a time")
    served.finds(tokens, 3 * served.size, "a prompt that was committed one token at a time")


@check("PREFIX-02acd", "prefix")
def what_is_written_over_is_committed_anew(subject: Subject) -> None:
    need_tokens(subject)
    subject.need(sequences=2)
    served = PrefixFixture(subject)
    size, tokens = served.size, prompt(2 * served.size)
    again = [*tokens[: size + 1], *prompt(size - 1, 2), *prompt(1, 3)]
    if size == 1:
        again = [tokens[0], OTHER, OTHER]
    sequence = served.serve(tokens)
    start = next(at for at, token in enumerate(tokens) if token != again[at])
    with raises("TokenMismatch"):
        served.cache.commit(sequence, again[: 2 * size])
    served.told[sequence] = again, ""
    served.write(sequence, start, 2 * size)
    served.cache.commit(sequence, again[: 2 * size])
    with suppress(NotOffered):
        declared_order(subject)
        assert_equal(served.match([*tokens, OTHER]), 2 * size, "match of the overwritten prompt")
    served.finds(again, 2 * size, "the prompt of the new tokens")


@check("PREFIX-03a", "prefix")
def any_other_token_is_another_prompt(subject: Subject) -> None:
    served = PrefixFixture(subject)
    tokens = prompt(3 * served.size)
    served.there(tokens)
    for at in range(len(tokens)):
        other = [*tokens[:at], OTHER, *tokens[at + 1 :], OTHER]
        served.finds(other, at // served.size * served.size, f"a prompt with another token at position {at}")


@check("PREFIX-03a", "prefix")
def a_block_is_found_behind_its_own_beginning_only(subject: Subject) -> None:
    served = PrefixFixture(subject, 16)
    size = served.size
    a, b, c = (prompt(size, which) for which in (1, 2, 3))
    served.there([*a, *b], [*c, *a])
    for blocks, found in (([b], 0), ([a, a], 1), ([b, a], 0), ([c, b], 1), ([a, b, a], 2), ([c, a, b], 2)):
        tokens = [token for block in blocks for token in block]
        served.finds([*tokens, OTHER], found * size, f"a prompt of which the first {found} blocks are cached")


@check("PREFIX-03a", "prefix")
def a_salt_keeps_prompts_apart(subject: Subject) -> None:
    served = PrefixFixture(subject, 16)
    tokens, size = prompt(2 * served.size), served.size
    for salt in ("", "a", "b"):
        assert_equal(served.match([*tokens, OTHER], salt), 0, f"match with the salt {salt!r} before its first use")
        served.there(tokens, salt=salt)
        served.finds([*tokens, OTHER], 2 * size, f"the prompt with the salt {salt!r}", salt)
    for salt in ("A", "ab", "a ", "0", "é"):
        served.finds([*tokens, OTHER], 0, f"a prompt with the salt {salt!r}", salt)


@check("PREFIX-03b", "prefix")
def tokens_that_hash_alike_are_not_alike(subject: Subject) -> None:
    """Prompts that collide under sums, exclusive ors, polynomials, Python's hash (modulo 2^61 - 1) or narrower integers."""
    served = PrefixFixture(subject, 40)
    size = served.size
    alike = [(5, 5 + 2**8), (5, 5 + 2**16), (5, 5 + 2**31), (5, 5 + 2**32), (2**52, 2**52 + 1)]
    if not subject.by_value:  # some JSON readers have no larger numbers
        alike += [(5, 5 + 2**61 - 1), (2**60, 2**60 + 1), (2**62, 2**62 + 2**32), (2**63 - 1, 2**63 - 2), (0, 2**61 - 1)]
    pairs = [([*prompt(size - 1), one], [*prompt(size - 1), other]) for one, other in alike]
    if size > 1:
        rest = prompt(size - 2)
        twos = (((3, 9), (9, 3)), ((3, 9), (4, 8)), ((3, 9), (2, 8)), ((1, 0), (0, 31)), ((1, 23), (12, 3)), ((7, 7), (8, 8)))
        pairs += [([*one, *rest], [*other, *rest]) for one, other in twos]
    for one, other in pairs:
        served.there(one)
        served.finds([*other, OTHER], 0, f"the uncommitted prompt {other}, with {one} committed")
        served.finds([*one, OTHER], size, f"the committed prompt {one}")
        served.release()


@check("PREFIX-04a", "prefix")
def a_block_that_is_not_full_is_not_found(subject: Subject) -> None:
    subject.need(sequences=2)
    served = PrefixFixture(subject)
    if served.size == 1:
        raise NotOffered("a partly filled block, where its limits say block_size 1")
    tokens = prompt(2 * served.size - 1)
    served.serve(tokens)
    size = served.size
    for more in ([], [OTHER], [tokens[-1] + 1, OTHER], [0] * size, [tokens[-1]] * size):  # possible ways to pad the block
        served.finds([*tokens, *more], size, "a prompt whose second block is not full")


@check("PREFIX-04b", "prefix")
def what_was_not_committed_is_not_found(subject: Subject) -> None:
    subject.need(sequences=2)
    served = PrefixFixture(subject)
    size, tokens = served.size, prompt(3 * served.size + 1)
    sequence, _ = served.begin(tokens)
    assert_equal(served.match(tokens), 0, "match of the tokens of a sequence without commit")
    served.write(sequence, 0, len(tokens))
    assert_equal(served.match(tokens), 0, "match of written tokens without commit")
    for count in (size - 1, size, 2 * size - 1, 2 * size):
        served.cache.commit(sequence, tokens[:count])
        served.finds(tokens, count // size * size, f"a prompt of which {count} tokens were committed")
    served.cache.drop(sequence)
    served.finds(tokens, 2 * size, "a prompt of which two blocks were committed, after drop")


@check("PREFIX-12a", "prefix")
def a_hit_reads_as_a_miss(subject: Subject) -> None:
    need_tokens(subject)
    served = PrefixFixture(subject, 24)
    size, tokens = served.size, prompt(3 * served.size + 1)
    for round in ("without a hit", "with a hit", "with a second hit"):
        for count in (len(tokens), 2 * size, 2 * size + 1):
            sequence = served.serve(tokens[:count])
            served.look(sequence, count, f"{count} tokens {round}")
            for layer in served.layers:
                assert_equal(int(served.cache.length(sequence, layer)), count, f"length of layer {layer} {round}")
            served.cache.drop(sequence)


@check("PREFIX-12b", "prefix")
def a_hit_attends_as_a_miss(subject: Subject) -> None:
    served = PrefixFixture(subject, 24)
    tokens, query = prompt(2 * served.size + 1), queries(subject, 1)
    for time in ("without a hit", "with a hit"):
        sequence = served.serve(tokens)
        for layer in served.layers:
            keys, values = served.computed(sequence, layer, range(len(tokens)))
            want, bound = expected_attention(subject, query, keys, values, scale=default_scale(subject))
            assert_within(
                served.cache.attend(sequence, layer, query, default_scale(subject)),
                want,
                bound,
                f"attention in layer {layer} {time}",
            )
        served.cache.drop(sequence)


@check("PREFIX-15b", "prefix")
def what_is_no_token_is_refused(subject: Subject) -> None:
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
    served.finds([*tokens, OTHER], served.size, "the prompt that was committed")


@check("PREFIX-15a", "prefix")
def tokens_of_any_type_find_each_other(subject: Subject) -> None:
    subject.in_this_process("integers of NumPy's types")
    subject.need(sequences=2)
    served = PrefixFixture(subject, 40)
    for number, wrote in enumerate((int, *TYPES)):
        tokens = [(7 * number + position) % 100 for position in range(2 * served.size)]
        typed: list[Any] = [wrote(token) for token in tokens]
        sequence, _ = served.begin(typed)
        served.write(sequence, 0, len(tokens))
        served.cache.commit(sequence, typed)
        for asked in (int, *TYPES):
            wanted: list[Any] = [asked(token) for token in (*tokens, OTHER)]
            what = f"tokens of type {asked.__name__}, committed as {wrote.__name__}"
            assert_equal(served.cache.match(wanted), 2 * served.size, f"match of {what}")
            true(type(served.cache.match(wanted)) is int, f"match of {what}", "an integer", type(served.cache.match(wanted)))
        served.cache.drop(sequence)


# Checks of PREFIX-16: hits in formats with scales.


@check("PREFIX-16a", "prefix")
def a_hit_reads_the_bits_that_were_committed(subject: Subject) -> None:
    subject.need(sequences=2)
    for name in of_each_kind(subject, PLACES):
        served = PrefixFixture(subject, **of_format(name))
        tokens, hit = prompt(2 * served.size + 1), 2 * served.size
        first = served.serve(tokens)
        before = [part[:hit] for part in served.cache.gather(first, 0)]
        if not subject.limits.switch(subject.family, "other_eviction_order"):  # then it is found after drop
            served.cache.drop(first)
            served.seen(prompt(served.size + 1, 2))
        again, found = served.begin([*tokens, 1])
        assert_equal(found, hit, f"length of a sequence that begins with a hit in {name}")
        assert_pair(
            served.cache.gather(again, 0), (before[0], before[1]), f"the hit in {name}, compared with the committed tokens"
        )
        served.look(again, hit, f"the hit in {name}")


@check("PREFIX-16b", "prefix")
def what_was_evicted_comes_back_with_scales_of_its_own(subject: Subject) -> None:
    for name in of_each_kind(subject, PLACES):
        served = exactly(subject, 3, **of_format(name))
        one, other = prompt(2 * served.size + 1), prompt(3 * served.size, 2)
        for tokens in (one, other, one):  # each needs almost every block
            sequence = served.serve(tokens)
            served.look(sequence, len(tokens), f"tokens written to reused blocks, in {name}")
            served.cache.drop(sequence)


# Checks of PREFIX-03: tokens whose 64-bit hashes collide.

PAGE = 256  # tokens per block: the default of transformers
# A first block of 224 ones, either five of these tokens, and 27 ones. Both blocks have the 64-bit BLAKE2b hash 0x2ee99e83f5615a8a
# (over int32). The search for them took eight minutes on one core.
ALIKE = [7232, 6294, 7679, 2095, 839], [7821, 5009, 4025, 7586, 128]


@check("PREFIX-03b", "prefix")
def tokens_of_one_short_hash_are_not_alike(subject: Subject) -> None:
    served = PrefixFixture(subject, 4, block_size=PAGE)
    if served.size != PAGE:
        raise NotOffered(f"blocks of {PAGE} tokens, where its limits say {subject.limits.of(subject.family, 'block_size')}")
    one, other = ([*[1] * 224, *five, *[1] * 27] for five in ALIKE)
    served.there(one)
    served.finds([*other, 1], 0, "256 tokens whose 64-bit hash is that of other committed tokens")
    served.finds([*one, 1], PAGE, "the 256 tokens that were committed")


# Registers the checks of the paged cache for prefix caches too, except those of LAW-18.

asked_of("prefix", "paged", but=("LAW-18",))


# Checks of LAW-18: prefixes at the sizes of serving.

LONG = 4096  # tokens of a system prompt


def serving(subject: Subject, entries: int, **sizes: Any) -> PrefixFixture:
    wanted = {"block_size": 16, "num_layers": 1, "num_kv_heads": 1, "head_dim": 64} | sizes
    served = (
        PrefixFixture(subject, 1, **wanted)
        if subject.size("num_blocks", entries) < entries
        else PrefixFixture(subject, entries, **wanted)
    )
    if room(served.cache) < 8:
        raise NotOffered(f"blocks for 8 entries, where its limits say {subject.limits.of(subject.family, 'num_blocks')}")
    return served


@check("LAW-18", "prefix")
def hundreds_of_sequences_share_a_long_prefix(subject: Subject) -> None:
    subject.need(sequences=2)
    served = serving(subject, LONG // 16 + 300)
    entries = min(LONG // served.size, room(served.cache) // 2)
    tokens = prompt(affordable(subject, entries * served.size) // served.size * served.size)
    if not tokens:
        raise NotOffered("room for a prefix of at least one block")
    first = served.serve(tokens)
    free, layers = served.cache.num_free_blocks, len(served.layers)
    count = min(subject.size("sequences", 250) - 1, free // layers)
    many = []
    for which in range(count):
        sequence, hit = served.begin([*tokens, 2_000_000 + which])
        assert_equal(hit, len(tokens), f"the hit of sequence {which} with a shared prefix")
        served.write(sequence, hit, hit + 1)
        many.append(sequence)
    assert_equal(
        served.cache.num_free_blocks, free - count * layers, f"free blocks after begin of {count} sequences with the prefix"
    )
    served.cache.drop(first)
    for sequence in many[:: max(1, count // 4)]:
        served.look(sequence, len(tokens) + 1, "a sequence with a shared prefix")
    for sequence in many:
        if tables_alone(subject):
            served.cache.drop(sequence)
            continue
        ends = [0, len(tokens) - 1, len(tokens)]
        want = served.computed(sequence, 0, ends)
        assert_pair(served.cache.read(sequence, 0, ends), want, "the first and last tokens of a sequence with a shared prefix")
        served.cache.drop(sequence)
    assert_equal(served.match([*tokens, 0]), len(tokens), "match of a prefix after drop of all sequences")


@check("LAW-18", "prefix")
def blocks_are_found_and_taken_in_thousands(subject: Subject) -> None:
    declared_order(subject)
    served = serving(subject, 2048, head_dim=8)
    whole, size, layers = room(served.cache), served.size, len(served.layers)
    rows = max(1, affordable(subject, 4 * size) // size)  # blocks per prompt
    tokens = [prompt(rows * size, 10 + which) for which in range(min(whole // rows, affordable(subject, 500)))]
    served.seen(*tokens)
    assert_equal(
        [served.match([*each, 0]) for each in tokens], [rows * size] * len(tokens), "match of prompts that fill the pool"
    )
    spare = whole - rows * len(tokens)
    taker = served.taking(spare + rows * (len(tokens) // 2))
    found = [served.match([*each, 0]) // size for each in tokens]
    half = len(tokens) // 2
    assert_equal(
        found, [0] * half + [rows] * (len(tokens) - half), "numbers of cached blocks of prompts after half of them were evicted"
    )
    for which in range(half, len(tokens), max(1, len(tokens) // 8)):
        served.begins(tokens[which], (rows - 1) * size, f"prompt {which}")
    served.cache.drop(taker)
    free = served.cache.num_free_blocks
    true(free >= whole * layers, "free blocks without live sequences", f"at least {whole * layers}", free)


@check("LAW-18", "prefix", real=True)
def a_prefix_cache_serves_a_thousand_prompts(subject: Subject) -> None:
    """The hits depend on the order of eviction, but must be right in any order."""
    served = serving(subject, 1024, num_layers=2, head_dim=32)
    longest = min(40 * served.size, room(served.cache) * served.size // 4)
    for round in range(affordable(subject, 1000, longest)):
        branch, cut = int(subject.rng.integers(1, 40)), int(subject.rng.integers(1, longest))
        tokens = [*prompt(cut // 2, 1 + branch % 5), *prompt(cut - cut // 2, 10 + branch)]
        sequence, hit = served.begin(tokens)
        if round % 10 == 0:
            served.look(sequence, hit, f"the hit of prompt {round}")
        served.write(sequence, hit, cut)
        served.cache.commit(sequence, tokens)
        if round % 50 == 0:
            served.look(sequence, cut, f"prompt {round}")
        served.cache.drop(sequence)
    assert_equal(served.cache.num_free_blocks, served.cache.config["num_blocks"], "free blocks without live sequences")


# Checks of PREFIX: committed tokens after truncations, overwrites and forks, and salts.


@check("PREFIX-02ad", "prefix")
def what_comes_after_a_cut_is_committed_anew(subject: Subject) -> None:
    subject.need(sequences=2)
    size = PrefixFixture(subject).size
    for length in dict.fromkeys((0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size)):
        served = PrefixFixture(subject, 16)
        old = prompt(3 * size)
        new = [*old[:length], *prompt(3 * size - length, 2)]
        sequence = served.serve(old)
        served.cache.truncate(sequence, length)
        served.told[sequence] = new, ""
        served.write(sequence, length, len(new))
        served.cache.commit(sequence, new)
        served.finds([*new, OTHER], len(new), f"a prompt that was committed after truncate({length})")
        again, hit = served.begin([*old, OTHER])  # the old blocks can still be cached
        served.look(again, hit, f"the hit of the original prompt after truncate({length})")


@check("PREFIX-02c", "prefix")
def commits_must_agree_where_no_block_is_full(subject: Subject) -> None:
    served = PrefixFixture(subject)
    if served.size == 1:
        raise NotOffered("a partly filled block, where its limits say block_size 1")
    tokens = prompt(2 * served.size - 1)
    sequence = served.serve(tokens)
    with raises("TokenMismatch"):
        served.cache.commit(sequence, [*tokens[:-1], OTHER])
    served.cache.commit(sequence, tokens)


@check("PREFIX-02d", "prefix")
def what_one_layer_has_otherwise_is_committed_no_more(subject: Subject) -> None:
    need_tokens(subject)
    subject.need(num_layers=2, sequences=2)
    for layer in (0, 1):
        served = PrefixFixture(subject)
        size, tokens = served.size, prompt(2 * served.size)
        other = [*tokens[:size], *prompt(size, 2)]
        sequence = served.serve(tokens)
        served.told[sequence] = other, ""
        served.write(sequence, size, 2 * size, layers=[layer])
        served.cache.commit(sequence, other)  # no TokenMismatch: these positions are not committed any more


@check("PREFIX-03a", "prefix")
def salts_count_to_their_last_letter(subject: Subject) -> None:
    served = PrefixFixture(subject, 16)
    tokens, long = prompt(2 * served.size), "tenant-0123456789abcdef/adapter-0123456789abcdef/"
    served.there(tokens, salt=f"{long}1")
    served.finds([*tokens, OTHER], 2 * served.size, "a prompt with a long salt", f"{long}1")
    for salt in (f"{long}2", long, f"T{long[1:]}1", f"{long}1 ", long[-8:] + "1"):
        served.finds([*tokens, OTHER], 0, f"a prompt with the salt {salt!r}", salt)


@check("PREFIX-03ac", "prefix")
def each_sequence_commits_with_its_own_salt(subject: Subject) -> None:
    subject.need(sequences=3)
    served = PrefixFixture(subject, 16)
    size, one, two = served.size, prompt(2 * served.size), prompt(2 * served.size, 2)
    begun = [(served.begin(tokens, salt)[0], tokens, salt) for tokens, salt in ((one, "a"), (two, "b"))]
    for sequence, tokens, _ in begun:
        served.write(sequence, 0, 2 * size)
        served.cache.commit(sequence, tokens)
    for _, tokens, own in begun:
        for salt in ("", "a", "b"):
            served.finds(
                [*tokens, OTHER],
                2 * size * (salt == own),
                f"a prompt that was committed with salt {own!r}, with salt {salt!r}",
                salt,
            )


@check("PREFIX-03c", "prefix")
def a_fork_has_the_salt_of_what_it_comes_from(subject: Subject) -> None:
    subject.need(sequences=3)
    for short in (1, 0):  # second: without a full block, only the salt is inherited
        served = PrefixFixture(subject, 16)
        size, tokens = served.size, prompt(2 * served.size)
        parent, begun = served.begin(tokens, "a")[0], size - short
        served.write(parent, 0, begun)
        served.cache.commit(parent, tokens[:begun])
        child = served.cache.fork(parent)
        served.told[child] = tokens, "a"
        served.write(child, begun, 2 * size)
        served.cache.commit(child, tokens)
        served.finds([*tokens, OTHER], 2 * size, "a prompt that a fork committed, with its parent's salt", "a")
        served.finds([*tokens, OTHER], 0, "a prompt that a fork committed, without a salt")


@check("PREFIX-11a", "prefix")
def reset_is_refused_while_a_fork_lives(subject: Subject) -> None:
    subject.need(sequences=2)
    served = PrefixFixture(subject)
    parent = served.serve(prompt(served.size))
    child = served.cache.fork(parent)
    served.cache.drop(parent)
    with raises("InUse"):
        served.cache.reset()
    served.cache.drop(child)
    served.cache.reset()
