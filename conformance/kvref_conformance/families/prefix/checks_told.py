"""Checks of PREFIX: committed tokens after truncations, overwrites and forks, and salts."""

from kvref_conformance.checking.expect import raises
from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.paged.counting import need_tokens
from kvref_conformance.families.prefix.served import Served, prompt
from kvref_conformance.outcome import NotOffered

OTHER = 77  # a token that is in no prompt


@check("PREFIX-02ad", "prefix")
def what_comes_after_a_cut_is_committed_anew(subject: Subject) -> None:
    subject.need(sequences=2)
    size = Served(subject).size
    for length in dict.fromkeys((0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size)):
        served = Served(subject, 16)
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
    served = Served(subject)
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
        served = Served(subject)
        size, tokens = served.size, prompt(2 * served.size)
        other = [*tokens[:size], *prompt(size, 2)]
        sequence = served.serve(tokens)
        served.told[sequence] = other, ""
        served.write(sequence, size, 2 * size, layers=[layer])
        served.cache.commit(sequence, other)  # no TokenMismatch: these positions are not committed any more


@check("PREFIX-03a", "prefix")
def salts_count_to_their_last_letter(subject: Subject) -> None:
    served = Served(subject, 16)
    tokens, long = prompt(2 * served.size), "tenant-0123456789abcdef/adapter-0123456789abcdef/"
    served.there(tokens, salt=f"{long}1")
    served.finds([*tokens, OTHER], 2 * served.size, "a prompt with a long salt", f"{long}1")
    for salt in (f"{long}2", long, f"T{long[1:]}1", f"{long}1 ", long[-8:] + "1"):
        served.finds([*tokens, OTHER], 0, f"a prompt with the salt {salt!r}", salt)


@check("PREFIX-03ac", "prefix")
def each_sequence_commits_with_its_own_salt(subject: Subject) -> None:
    subject.need(sequences=3)
    served = Served(subject, 16)
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
        served = Served(subject, 16)
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
    served = Served(subject)
    parent = served.serve(prompt(served.size))
    child = served.cache.fork(parent)
    served.cache.drop(parent)
    with raises("InUse"):
        served.cache.reset()
    served.cache.drop(child)
    served.cache.reset()
