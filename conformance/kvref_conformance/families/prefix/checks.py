"""Checks of PREFIX: which blocks are found."""

from contextlib import suppress
from typing import Any

from kvref_conformance.checking.attending import even, exact, queries
from kvref_conformance.checking.expect import equal, raises, true, within
from kvref_conformance.checking.integers import TYPES
from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.paged.counting import need_tokens, tables_alone
from kvref_conformance.families.prefix.served import Served, declared_order, prompt
from kvref_conformance.outcome import NotOffered

OTHER = 77  # a token that is in no prompt


@check("PREFIX-01ab", "prefix")
def hits_end_where_blocks_do(subject: Subject) -> None:
    subject.need(sequences=2)
    for size in dict.fromkeys(subject.size("block_size", wanted) for wanted in (1, 2, 3, 4, 16)):
        served = Served(subject, block_size=size)
        size, tokens = served.size, prompt(3 * served.size + 1)
        served.serve(tokens)
        for count in dict.fromkeys((0, 1, size - 1, size, size + 1, 2 * size, 2 * size + 1, 3 * size, 3 * size + 1)):
            if count or not tables_alone(subject):
                served.finds(tokens[:count], max(0, count - 1) // size * size, f"a prompt of {count} tokens in blocks of {size}")
        served.finds([*tokens, OTHER], len(tokens) // size * size, "a prompt that continues after the committed tokens")


@check("PREFIX-01ab", "prefix")
def one_token_is_always_left(subject: Subject) -> None:
    served = Served(subject)
    for blocks in (1, 2, 3):
        tokens = prompt(blocks * served.size, blocks)
        served.there(tokens)
        served.finds(tokens, (blocks - 1) * served.size, f"a prompt of {blocks} full blocks, all of them cached")


@check("PREFIX-01c", "prefix")
def what_begins_has_room_for_all_its_tokens(subject: Subject) -> None:
    declared_order(subject)
    served = Served(subject)
    cache, size, layers = served.cache, served.size, len(served.layers)
    served.there(prompt(2 * size))
    for tokens in (prompt(2 * size + 1), prompt(4 * size), prompt(size + 1, 2), []):
        if not tokens and tables_alone(subject):
            continue
        sequence, hit = served.begin(tokens)
        entries = -(-len(tokens) // size)
        what = f"free blocks after begin with {len(tokens)} tokens, of which {hit} were cached"
        equal(cache.num_free_blocks, cache.config["num_blocks"] - layers * entries, what)
        served.write(sequence, hit, len(tokens))
        equal(cache.num_free_blocks, cache.config["num_blocks"] - layers * entries, f"{what}, and a write of the others")
        served.look(sequence, len(tokens), "a sequence whose tokens after the hit were written")
        cache.drop(sequence)


@check("PREFIX-01ab", "prefix")
def prompts_share_as_much_as_they_have_in_common(subject: Subject) -> None:
    served = Served(subject, 16)
    size, tokens = served.size, prompt(3 * served.size)
    longer, branch = [*tokens[: 2 * size], *prompt(size, 2)], [*tokens[:size], *prompt(size, 3)]
    served.there(tokens, longer, branch)
    for each, blocks in ((tokens, 3), (longer, 3), (branch, 2), ([*tokens[: 2 * size], *prompt(size, 4)], 2)):
        served.finds([*each, OTHER], blocks * size, f"a prompt of which {blocks} blocks are cached")


@check("PREFIX-02ab", "prefix")
def only_what_every_layer_has_can_be_committed(subject: Subject) -> None:
    need_tokens(subject)
    served = Served(subject)
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
    equal(served.match(tokens), 0, "match after a rejected commit")
    served.cache.commit(sequence, tokens[:written])
    served.finds(tokens, written // size * size, f"a prompt of which {written} tokens were committed")


@check("PREFIX-02c", "prefix")
def commits_must_agree(subject: Subject) -> None:
    served = Served(subject)
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
    equal(served.match([OTHER, *tokens[1:]]), 0, "match of the tokens of a rejected commit")
    served.finds(tokens, 2 * size, "the prompt that was committed before")


@check("PREFIX-02a", "prefix")
def commits_may_come_piece_by_piece(subject: Subject) -> None:
    subject.need(sequences=2)
    served = Served(subject)
    tokens = prompt(3 * served.size + 1)
    sequence, _ = served.begin(tokens)
    for count in range(len(tokens)):
        served.write(sequence, count, count + 1)
        served.cache.commit(sequence, tokens[: count + 1])
        found = (count + 1) // served.size * served.size
        equal(served.match(tokens), found, f"match after {count + 1} tokens were committed one at a time")
    served.finds(tokens, 3 * served.size, "a prompt that was committed one token at a time")


@check("PREFIX-02acd", "prefix")
def what_is_written_over_is_committed_anew(subject: Subject) -> None:
    need_tokens(subject)
    subject.need(sequences=2)
    served = Served(subject)
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
        equal(served.match([*tokens, OTHER]), 2 * size, "match of the overwritten prompt")
    served.finds(again, 2 * size, "the prompt of the new tokens")


@check("PREFIX-03a", "prefix")
def any_other_token_is_another_prompt(subject: Subject) -> None:
    served = Served(subject)
    tokens = prompt(3 * served.size)
    served.there(tokens)
    for at in range(len(tokens)):
        other = [*tokens[:at], OTHER, *tokens[at + 1 :], OTHER]
        served.finds(other, at // served.size * served.size, f"a prompt with another token at position {at}")


@check("PREFIX-03a", "prefix")
def a_block_is_found_behind_its_own_beginning_only(subject: Subject) -> None:
    served = Served(subject, 16)
    size = served.size
    a, b, c = (prompt(size, which) for which in (1, 2, 3))
    served.there([*a, *b], [*c, *a])
    for blocks, found in (([b], 0), ([a, a], 1), ([b, a], 0), ([c, b], 1), ([a, b, a], 2), ([c, a, b], 2)):
        tokens = [token for block in blocks for token in block]
        served.finds([*tokens, OTHER], found * size, f"a prompt of which the first {found} blocks are cached")


@check("PREFIX-03a", "prefix")
def a_salt_keeps_prompts_apart(subject: Subject) -> None:
    served = Served(subject, 16)
    tokens, size = prompt(2 * served.size), served.size
    for salt in ("", "a", "b"):
        equal(served.match([*tokens, OTHER], salt), 0, f"match with the salt {salt!r} before its first use")
        served.there(tokens, salt=salt)
        served.finds([*tokens, OTHER], 2 * size, f"the prompt with the salt {salt!r}", salt)
    for salt in ("A", "ab", "a ", "0", "é"):
        served.finds([*tokens, OTHER], 0, f"a prompt with the salt {salt!r}", salt)


@check("PREFIX-03b", "prefix")
def tokens_that_hash_alike_are_not_alike(subject: Subject) -> None:
    """Prompts that collide under sums, exclusive ors, polynomials, Python's hash (modulo 2^61 - 1) or narrower integers."""
    served = Served(subject, 40)
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
    served = Served(subject)
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
    served = Served(subject)
    size, tokens = served.size, prompt(3 * served.size + 1)
    sequence, _ = served.begin(tokens)
    equal(served.match(tokens), 0, "match of the tokens of a sequence without commit")
    served.write(sequence, 0, len(tokens))
    equal(served.match(tokens), 0, "match of written tokens without commit")
    for count in (size - 1, size, 2 * size - 1, 2 * size):
        served.cache.commit(sequence, tokens[:count])
        served.finds(tokens, count // size * size, f"a prompt of which {count} tokens were committed")
    served.cache.drop(sequence)
    served.finds(tokens, 2 * size, "a prompt of which two blocks were committed, after drop")


@check("PREFIX-12a", "prefix")
def a_hit_reads_as_a_miss(subject: Subject) -> None:
    need_tokens(subject)
    served = Served(subject, 24)
    size, tokens = served.size, prompt(3 * served.size + 1)
    for round in ("without a hit", "with a hit", "with a second hit"):
        for count in (len(tokens), 2 * size, 2 * size + 1):
            sequence = served.serve(tokens[:count])
            served.look(sequence, count, f"{count} tokens {round}")
            for layer in served.layers:
                equal(int(served.cache.length(sequence, layer)), count, f"length of layer {layer} {round}")
            served.cache.drop(sequence)


@check("PREFIX-12b", "prefix")
def a_hit_attends_as_a_miss(subject: Subject) -> None:
    served = Served(subject, 24)
    tokens, query = prompt(2 * served.size + 1), queries(subject, 1)
    for time in ("without a hit", "with a hit"):
        sequence = served.serve(tokens)
        for layer in served.layers:
            keys, values = served.computed(sequence, layer, range(len(tokens)))
            want, bound = exact(subject, query, keys, values, scale=even(subject))
            within(served.cache.attend(sequence, layer, query, even(subject)), want, bound, f"attention in layer {layer} {time}")
        served.cache.drop(sequence)


@check("PREFIX-15b", "prefix")
def what_is_no_token_is_refused(subject: Subject) -> None:
    served = Served(subject)
    tokens, cache = prompt(served.size), served.cache
    served.serve(tokens)
    sequence, hit = served.begin(prompt(served.size, 2))
    served.write(sequence, hit, served.size)  # not committed, so that a commit contradicts no earlier one
    free = cache.num_free_blocks
    for wrong in [*subject.integers(-1), *([] if subject.by_value else [2**63, 2**64])]:
        for name, arguments in (("match", ([*tokens, wrong],)), ("begin", ([wrong, *tokens],)), ("commit", (sequence, [wrong]))):
            with raises("TokenOutOfRange"):
                getattr(cache, name)(*arguments)
    equal(cache.num_free_blocks, free, "free blocks after rejected tokens")
    served.finds([*tokens, OTHER], served.size, "the prompt that was committed")


@check("PREFIX-15a", "prefix")
def tokens_of_any_type_find_each_other(subject: Subject) -> None:
    subject.in_this_process("integers of NumPy's types")
    subject.need(sequences=2)
    served = Served(subject, 40)
    for number, wrote in enumerate((int, *TYPES)):
        tokens = [(7 * number + position) % 100 for position in range(2 * served.size)]
        typed: list[Any] = [wrote(token) for token in tokens]
        sequence, _ = served.begin(typed)
        served.write(sequence, 0, len(tokens))
        served.cache.commit(sequence, typed)
        for asked in (int, *TYPES):
            wanted: list[Any] = [asked(token) for token in (*tokens, OTHER)]
            what = f"tokens of type {asked.__name__}, committed as {wrote.__name__}"
            equal(served.cache.match(wanted), 2 * served.size, f"match of {what}")
            true(type(served.cache.match(wanted)) is int, f"match of {what}", "an integer", type(served.cache.match(wanted)))
        served.cache.drop(sequence)
