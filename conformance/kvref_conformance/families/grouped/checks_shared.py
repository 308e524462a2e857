"""Checks of PAGED, PREFIX, SHARE and EDIT for the grouped cache: these clauses hold in every group."""

from kvref_conformance.checking.expect import equal, raises, true
from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.grouped.checks import one, reach
from kvref_conformance.families.grouped.checks_prefixes import OTHER, finds
from kvref_conformance.families.grouped.grown import Grown, One
from kvref_conformance.families.prefix.served import declared_order, prompt
from kvref_conformance.outcome import NotOffered


@check("PAGED-01ab", "grouped")
def ids_never_come_back(subject: Subject) -> None:
    grown, given = Grown(subject, 20), list[int]()
    for tokens in ([], prompt(2), prompt(4), []):
        for sequence in (
            (grown.begin(tokens), grown.create(tokens)) if subject.size("sequences", 2) > 1 else (grown.begin(tokens),)
        ):
            true(sequence not in given, "the id of a new sequence", f"an id not in {given}", sequence)
            given.append(sequence)
        for sequence in list(grown.sequences):
            grown.drop(sequence)
            with raises("SequenceNotFound"):
                grown.cache.length(sequence)


@check("PAGED-07ab", "grouped")
def dropping_gives_back_the_blocks_of_every_group(subject: Subject) -> None:
    for length in (1, subject.size("block_size", 3), reach(subject)):
        grown, sequence = one(subject, length)
        for _ in range(3):
            grown.up_to(sequence, length, by=2)
            grown.drop(sequence)
            grown.counted(f"after drop of a sequence of {length} tokens")
            sequence = grown.create(prompt(length))


@check("PREFIX-02abc", "grouped")
def commits_say_what_was_stepped_through(subject: Subject) -> None:
    declared_order(subject)
    grown = Grown(subject, 4 * reach(subject))
    size, tokens = grown.size, prompt(3 * grown.size)
    sequence = grown.begin(tokens)
    grown.up_to(sequence, 2 * size, by=size)
    with raises("PositionOutOfRange"):
        grown.cache.commit(sequence, tokens[: 2 * size + 1])
    equal(grown.match(tokens), 0, "match after commit raised PositionOutOfRange")
    grown.commit(sequence)
    with raises("TokenMismatch"):
        grown.cache.commit(sequence, [OTHER, *tokens[1 : 2 * size]])
    grown.drop(sequence)
    finds(grown, tokens, 2 * size, "a prompt of which two blocks were committed")
    later = grown.begin(tokens)
    with raises("TokenMismatch"):
        grown.cache.commit(later, [OTHER])


@check("PREFIX-11ab", "grouped")
def reset_forgets_what_every_group_held(subject: Subject) -> None:
    grown = Grown(subject, 4 * reach(subject))
    tokens = prompt(2 * grown.size + 1)
    sequence = grown.serve(tokens)
    with raises("InUse"):
        grown.cache.reset()
    grown.look(sequence, "a sequence after reset raised InUse")
    grown.drop(sequence)
    grown.cache.reset()
    finds(grown, tokens, 0, "a prompt after reset")
    equal(grown.cache.num_free_blocks, grown.total, "free blocks after reset")


@check("PREFIX-14ab", "grouped")
def what_can_be_found_is_never_stepped_into(subject: Subject) -> None:
    declared_order(subject)
    size = long_window(subject, 2)
    for length in range(1, 2 * size, max(1, size // 4)):
        grown = Grown(subject, 6 * size, window=3 * size + 1)
        tokens = prompt(2 * size)
        sequence = grown.serve(tokens, by=2)
        grown.truncate(sequence, length)
        grown.sequences[sequence].tokens = [*tokens[:length], *prompt(size, 5)]
        grown.step(sequence, 1)
        grown.look(sequence, f"a sequence after truncate to {length} tokens and a step of one token")
        grown.drop(sequence)
        finds(
            grown,
            [*tokens, OTHER],
            2 * size,
            f"a committed prompt after its sequence was truncated to {length} tokens and one token appended",
        )


@check("PREFIX-03c", "grouped")
def a_fork_has_the_salt_of_what_it_comes_from(subject: Subject) -> None:
    subject.need(sequences=2)
    size = subject.size("block_size", 3)
    for begun in (size - 1, size):  # before the first block is full, the fork inherits only the salt
        grown = Grown(subject, 3 * size, sequences=4)
        tokens = prompt(2 * size)
        parent = grown.begin(tokens, "a")
        grown.up_to(parent, begun, by=2, commit=True)
        child: int = grown.cache.fork(parent)
        like = grown.sequences[parent]
        grown.sequences[child] = One(tokens, "a", like.length, list(like.gone))
        grown.up_to(child, 2 * size, by=2, commit=True)
        finds(grown, [*tokens, OTHER], 2 * size, "a prompt that a fork committed, with its parent's salt", "a")
        finds(grown, [*tokens, OTHER], 0, "a prompt that a fork committed, without a salt")


@check("PREFIX-15b", "grouped")
def what_is_no_token_is_refused(subject: Subject) -> None:
    grown = Grown(subject, 20)
    tokens = prompt(grown.size)
    grown.serve(tokens)
    sequence = grown.begin(prompt(grown.size, 2))
    grown.up_to(sequence, 1)  # not committed, so that a commit contradicts no earlier one
    free = grown.cache.num_free_blocks
    for wrong in [*subject.integers(-1), *([] if subject.by_value else [2**63])]:
        for name, arguments in (("match", ([*tokens, wrong],)), ("begin", ([wrong, *tokens],)), ("commit", (sequence, [wrong]))):
            with raises("TokenOutOfRange"):
                getattr(grown.cache, name)(*arguments)
    equal(grown.cache.num_free_blocks, free, "free blocks after invalid tokens were rejected")
    equal(grown.match([*tokens, OTHER]), grown.size, "match of the committed prompt")


@check("SHARE-03bc", "grouped")
def a_fork_reads_as_its_parent_in_every_layer(subject: Subject) -> None:
    subject.need(sequences=2)
    length = reach(subject)
    for begun in (1, grown_to(subject), length):
        grown = Grown(subject, 3 * length)
        parent = grown.create(prompt(length + 2))
        grown.up_to(parent, begun, by=2)
        free = grown.cache.num_free_blocks
        child: int = grown.cache.fork(parent)
        like = grown.sequences[parent]
        other = [*like.tokens[:begun], *prompt(length, 6)]
        grown.sequences[child] = One(other, "", like.length, list(like.gone))
        equal(grown.cache.num_free_blocks, free, "free blocks after a fork")
        grown.look(child, f"a fork of {begun} tokens")
        for sequence in (child, parent, child, parent):
            grown.step(sequence, 1)
            for each, name in ((child, "the fork"), (parent, "the parent")):
                grown.look(each, f"{name} after a fork at {begun} tokens and steps of both")
                grown.attends(each, 1, f"{name} after a fork at {begun} tokens and steps of both")
        grown.drop(parent)
        grown.look(child, f"a fork at {begun} tokens after drop of its parent")
        grown.drop(child)
        equal(grown.cache.num_free_blocks, grown.total, "free blocks after drop of both sequences")


def long_window(subject: Subject, blocks: int) -> int:
    """Returns the block size. Raises NotOffered unless a window can be longer than `blocks` blocks."""
    size: int = subject.size("block_size", 3)
    if subject.size("window", 3 * size + 1) <= blocks * size:
        raise NotOffered(f"a window of {blocks * size + 1}, where its limits say {subject.limits.of('grouped', 'window')}")
    return size


def grown_to(subject: Subject) -> int:
    """Returns a length that is past the window and ends inside a block."""
    return int(subject.size("window", 7) + subject.size("block_size", 3) // 2 + 1)


@check("EDIT-01ac", "grouped")
def what_is_truncated_never_came(subject: Subject) -> None:
    size = long_window(subject, 3)
    for length in (0, 1, size, size + 1, 2 * size):
        grown, sequence = one(subject, 4 * size, window=3 * size + 1)
        grown.up_to(sequence, 3 * size, by=2)
        grown.truncate(sequence, length)
        grown.look(sequence, f"a sequence after truncate to {length} tokens")
        grown.sequences[sequence].tokens = [*prompt(length), *prompt(4 * size, 2)]
        grown.up_to(sequence, 3 * size + 1, by=2)
        grown.look(sequence, f"a sequence after truncate to {length} tokens and appends of other tokens")
        grown.attends(sequence, 1, f"a sequence after truncate to {length} tokens and appends of other tokens")


@check("EDIT-02ab", "grouped")
def more_than_there_are_cannot_be_left(subject: Subject) -> None:
    grown, sequence = one(subject, 7)
    grown.up_to(sequence, 5, by=2)
    for length in [6, *subject.integers(-1)]:
        with raises("PositionOutOfRange"):
            grown.cache.truncate(sequence, length)
        grown.look(sequence, f"a sequence after truncate to {length} raised PositionOutOfRange")
    grown.truncate(sequence, 5)
    grown.look(sequence, "a sequence after truncate to its own length")
