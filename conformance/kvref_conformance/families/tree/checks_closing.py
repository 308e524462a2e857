"""Checks of TREE-07 to TREE-12: trees are closed; blocks and sequences."""

from contextlib import suppress

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.tree.fixture import BRANCHES, TreeFixture
from kvref_conformance.testlib.assertions import assert_equal, assert_true, may_raise, raises
from kvref_conformance.testlib.fixtures import random_pair
from kvref_conformance.testlib.law_adapter import unknown_ids
from kvref_conformance.testlib.registry import check


@check("TREE-07a", "tree")
def accept_commits_the_path_in_order(subject: Subject) -> None:
    for length in (0, 3, 5):
        for node in range(len(BRANCHES)):
            fixture = TreeFixture(subject, length)
            fixture.draft(fixture.sequence, BRANCHES)
            fixture.accept(fixture.sequence, node)
            fixture.assert_contains(fixture.sequence, f"the tokens after accept of node {node}")
            assert_equal(fixture.cache.length(fixture.sequence), len(fixture.rows[fixture.sequence][0]), "length after accept")


@check("TREE-07a", "tree")
def accept_in_a_large_tree_commits_the_path(subject: Subject) -> None:
    for node in (149, 128, 64, 2):
        fixture = TreeFixture.with_deep_tree(subject)
        fixture.accept(fixture.sequence, node)
        fixture.assert_contains(fixture.sequence, f"the tokens after accept of node {node} of 150")


@check("TREE-07a", "tree")
def accept_after_accept_commits_both_paths(subject: Subject) -> None:
    fixture = TreeFixture(subject, 2)
    for parents, node in (([-1, -1, 1], 2), ([-1] * 6, 5), ([-1, 0, 1, 2], 1), ([-1, -1, 0, 1, 3, 4], 5)):
        fixture.draft(fixture.sequence, parents)
        fixture.accept(fixture.sequence, node)
        fixture.assert_contains(fixture.sequence, f"the tokens after accept of node {node} of a later tree")
        fixture.assert_attends(fixture.sequence, [-1], "after accept")


@check("TREE-07b", "tree")
def accept_closes_the_tree(subject: Subject) -> None:
    fixture = TreeFixture(subject, 3)
    fixture.draft(fixture.sequence, [-1, 0, 0])
    fixture.accept(fixture.sequence, 2)
    assert_equal(list(fixture.cache.positions(fixture.sequence)), [], "positions after accept")
    with raises("PositionOutOfRange"):
        fixture.cache.ancestors(fixture.sequence, 0)
    assert_equal(fixture.draft(fixture.sequence, [-1, 0]), [0, 1], "the numbers of the nodes of the next tree")
    assert_equal(list(fixture.cache.positions(fixture.sequence)), [5, 6], "positions of the next tree after 5 tokens")
    fixture.assert_attends(fixture.sequence, [0, 1, -1], "in the next tree")
    fixture.accept(fixture.sequence, 0)
    fixture.append(fixture.sequence, 1)
    fixture.assert_contains(fixture.sequence, "the tokens after accept and append")


@check("TREE-07c", "tree")
def accept_of_unknown_nodes_changes_nothing(subject: Subject) -> None:
    fixture = TreeFixture(subject, 3)
    for count in (0, 2):
        fixture.draft(fixture.sequence, [-1] * count)
        for node in subject.integers(-1, -2, count, count + 1, 10**6):
            with fixture.unchanged(), raises("PositionOutOfRange"):
                fixture.cache.accept(fixture.sequence, node)
    fixture.accept(fixture.sequence, 1)
    fixture.assert_contains(fixture.sequence, "the tokens after errors and accept")


@check("TREE-07d", "tree")
def accept_works_without_free_blocks(subject: Subject) -> None:
    for length in (1, 3, 4):
        blocks = 1 + -(-(length + 2) // subject.size("block_size", 4))
        fixture = TreeFixture(subject, length, num_blocks=blocks)
        fixture.need_blocks(blocks)
        count = fixture.config["num_blocks"] * fixture.size - length
        fixture.draft(fixture.sequence, [-1, *range(count - 1)])
        fixture.assert_free(0, "with a tree that fills the cache")
        fixture.accept(fixture.sequence, count - 1)
        fixture.assert_contains(fixture.sequence, "the tokens after accept without free blocks")


@check("TREE-07d", "tree")
def accept_in_a_fork_works_without_free_blocks(subject: Subject) -> None:
    subject.require_size(sequences=3)
    for length in (1, 3, 4):
        blocks = 2 * -(-(length + 3) // subject.size("block_size", 4))
        fixture = TreeFixture(subject, length, num_blocks=blocks)
        fixture.need_blocks(blocks)
        other, stranger = fixture.fork(fixture.sequence), fixture.create()
        for sequence in (fixture.sequence, other):
            fixture.draft(sequence, [-1, -1, 1])
        if free := fixture.cache.num_free_blocks:
            fixture.append(stranger, free * fixture.size)
        for sequence in (fixture.sequence, other):
            fixture.accept(sequence, 2)
            fixture.assert_contains(sequence, "a fork after accept without free blocks")
        fixture.assert_contains(stranger, "another sequence")


@check("TREE-08a", "tree")
def reject_restores_the_sequence(subject: Subject) -> None:
    for length in (0, 3, 4):
        fixture = TreeFixture(subject, length)
        free = fixture.cache.num_free_blocks
        for parents in ([-1], [-1, 0, 1, 2, 3], [-1] * 9):
            fixture.draft(fixture.sequence, parents)
            fixture.reject(fixture.sequence)
            fixture.assert_free(free, f"after {len(parents)} drafts and reject")
            assert_equal(list(fixture.cache.positions(fixture.sequence)), [], "positions after reject")
            assert_equal(fixture.cache.length(fixture.sequence), length, "length after reject")
            fixture.assert_contains(fixture.sequence, "the tokens after reject")
    fixture.append(fixture.sequence, 3)
    fixture.assert_contains(fixture.sequence, "the tokens after reject and append")


@check("TREE-08b", "tree")
def rejected_nodes_are_not_seen(subject: Subject) -> None:
    fixture = TreeFixture(subject, 3)
    for later in ([-1, 0, -1], [-1]):
        fixture.draft(fixture.sequence, BRANCHES)
        fixture.reject(fixture.sequence)
        fixture.assert_attends(fixture.sequence, [-1], "after reject")
        assert_equal(fixture.draft(fixture.sequence, later)[0], 0, "the number of the first node after reject")
        fixture.assert_attends(fixture.sequence, range(-1, len(later)), "in the next tree")
        fixture.reject(fixture.sequence)
        fixture.append(fixture.sequence, 2)
        fixture.assert_attends(fixture.sequence, [-1], "after reject and append")
    fixture.assert_contains(fixture.sequence, "the tokens after reject and append")


@check("TREE-08b", "tree")
def rejected_nodes_that_contain_nan_are_not_seen(subject: Subject) -> None:
    fixture = TreeFixture(subject, 3)
    bad = tuple(np.full_like(part, np.nan) for part in random_pair(subject, 6))
    with may_raise("NonFinite"):
        fixture.draft(fixture.sequence, [-1] * 6, (bad[0], bad[1]))
    fixture.reject(fixture.sequence)
    fixture.draft(fixture.sequence, [-1, -1])
    fixture.assert_attends(fixture.sequence, [0, 1, -1], "after reject of nodes that contain NaN")


@check("TREE-08c", "tree")
def reject_without_a_tree_changes_nothing(subject: Subject) -> None:
    fixture = TreeFixture(subject, 3)
    with fixture.unchanged():
        fixture.reject(fixture.sequence)
    fixture.draft(fixture.sequence, [-1, 0])
    fixture.accept(fixture.sequence, 1)
    with fixture.unchanged():
        fixture.reject(fixture.sequence)
    fixture.assert_contains(fixture.sequence, "the tokens after accept and reject")


@check("TREE-09", "tree")
def append_with_an_open_tree_raises(subject: Subject) -> None:
    fixture = TreeFixture(subject, 3)
    fixture.draft(fixture.sequence, [-1, -1])
    for count in (1, 9):
        with fixture.unchanged(), raises("InUse"):
            fixture.cache.append(fixture.sequence, *random_pair(subject, count))
    fixture.accept(fixture.sequence, 1)
    fixture.append(fixture.sequence, 1)
    fixture.assert_contains(fixture.sequence, "the tokens after InUse, accept and append")


@check("TREE-09", "tree")
def truncate_with_an_open_tree_raises(subject: Subject) -> None:
    fixture = TreeFixture(subject, 3)
    fixture.draft(fixture.sequence, [-1, -1])
    for length in (0, 2, 3):
        with fixture.unchanged(), raises("InUse"):
            fixture.cache.truncate(fixture.sequence, length)
    fixture.reject(fixture.sequence)
    fixture.truncate(fixture.sequence, 2)
    fixture.assert_contains(fixture.sequence, "the tokens after InUse, reject and truncate")


@check("TREE-09", "tree")
def fork_with_an_open_tree_raises(subject: Subject) -> None:
    subject.require_size(sequences=2)
    fixture = TreeFixture(subject, 3)
    fixture.draft(fixture.sequence, [-1])
    with fixture.unchanged(), raises("InUse"):
        fixture.cache.fork(fixture.sequence)
    fixture.accept(fixture.sequence, 0)
    fixture.assert_contains(fixture.fork(fixture.sequence), "a fork after InUse and accept")


@check("TREE-09", "tree")
def draft_of_no_nodes_opens_no_tree(subject: Subject) -> None:
    fixture = TreeFixture(subject, 3)
    fixture.draft(fixture.sequence, [])
    fixture.append(fixture.sequence, 2)
    fixture.draft(fixture.sequence, [])
    fixture.truncate(fixture.sequence, 4)
    fixture.draft(fixture.sequence, [])
    fixture.assert_contains(fixture.sequence, "the tokens after drafts of no nodes, append and truncate")
    if subject.size("sequences", 2) > 1:
        fixture.assert_contains(fixture.fork(fixture.sequence), "a fork after a draft of no nodes")


@check("TREE-10a", "tree")
def num_free_blocks_counts_nodes(subject: Subject) -> None:
    fixture = TreeFixture(subject)
    total, used = fixture.config["num_blocks"], fixture.size
    fixture.assert_free(total, "in a new cache")
    fixture.append(fixture.sequence, used - 1)
    for parents, node in (([-1, 0], 1), ([-1] * (2 * used + 1), 2), ([-1, 0, 1], 2)):
        fixture.draft(fixture.sequence, parents)
        length = len(fixture.rows[fixture.sequence][0])
        fixture.assert_free(total - -(-(length + len(parents)) // used), f"with {length} tokens and {len(parents)} nodes")
        fixture.accept(fixture.sequence, node)
        length = len(fixture.rows[fixture.sequence][0])
        fixture.assert_free(total - -(-length // used), f"after accept, with {length} tokens")
    fixture.draft(fixture.sequence, [-1] * used)
    fixture.cache.drop(fixture.sequence)
    fixture.assert_free(total, "after drop of a sequence with a tree")


@check("TREE-10b", "tree")
def related_sequences_use_no_more_blocks_than_they_fill(subject: Subject) -> None:
    subject.require_size(sequences=2)
    fixture = TreeFixture(subject)
    total, size = fixture.config["num_blocks"], fixture.size
    fixture.append(fixture.sequence, size + 1)
    other = fixture.fork(fixture.sequence)
    for step, parents in enumerate(([-1], [-1] * size, [-1] * (2 * size))):
        for sequence in (fixture.sequence, other):
            fixture.draft(sequence, parents)
        filled = [-(-(len(fixture.rows[each][0]) + len(parents)) // size) for each in (fixture.sequence, other)]
        used = total - fixture.cache.num_free_blocks
        assert_true(max(filled) <= used <= sum(filled), "used blocks", f"a number in [{max(filled)}, {sum(filled)}]", used)
        fixture.accept(fixture.sequence, len(parents) - 1)
        (fixture.reject if step else lambda each: fixture.accept(each, 0))(other)
    fixture.cache.drop(fixture.sequence)
    fixture.assert_free(total - -(-len(fixture.rows[other][0]) // size), "after drop of the relative")


@check("TREE-10cd", "tree")
def draft_and_append_without_enough_blocks_raise(subject: Subject) -> None:
    fixture = TreeFixture(subject, 3, num_blocks=5)
    room = fixture.config["num_blocks"] * fixture.size - 3
    for count in (room + 1, room + fixture.size + 1):
        with fixture.unchanged(), raises("OutOfBlocks"):
            fixture.draft(fixture.sequence, [-1] * count)
        with fixture.unchanged(), raises("OutOfBlocks"):
            fixture.cache.append(fixture.sequence, *random_pair(subject, count))
    fixture.draft(fixture.sequence, [-1] * (room - 1))
    with fixture.unchanged(), raises("OutOfBlocks"):
        fixture.draft(fixture.sequence, [0, 0])
    fixture.draft(fixture.sequence, [0])
    fixture.assert_free(0, "with a tree that fills the cache")
    fixture.accept(fixture.sequence, room - 1)
    fixture.append(fixture.sequence, room - 2)
    fixture.assert_contains(fixture.sequence, "a sequence that fills the cache")


@check("TREE-10cd", "tree")
def forks_draft_while_blocks_are_free(subject: Subject) -> None:
    """As many forks as there are blocks, each with one token that they share and one node."""
    subject.require_size(sequences=4, block_size=2)
    fixture = TreeFixture(subject, 1, num_blocks=4, block_size=2)
    forks = [fixture.sequence]
    while len(forks) < fixture.config["num_blocks"]:
        forks.append(fixture.fork(forks[-1]))
    for sequence in forks:
        fixture.draft(sequence, [-1] * (fixture.size - 1))
    fixture.assert_free(0, "with a tree in each fork")
    with fixture.unchanged(), raises("OutOfBlocks"):
        fixture.draft(forks[0], [-1])
    for sequence in forks:
        if fixture.paths[sequence]:
            fixture.accept(sequence, 0)
        fixture.assert_contains(sequence, "a fork after accept")


@check("TREE-11a", "tree")
def fork_copies_the_committed_tokens(subject: Subject) -> None:
    subject.require_size(sequences=3)
    for length in (0, 3, 4):
        fixture = TreeFixture(subject, length)
        fixture.draft(fixture.sequence, [-1, 0, 0])
        fixture.accept(fixture.sequence, 2)
        seen = [fixture.sequence]
        for parent in (fixture.sequence, fixture.sequence):
            other = fixture.fork(parent)
            assert_true(other not in seen, "the id of a fork", f"none of {seen}", other)
            seen.append(other)
            fixture.assert_contains(other, "a fork")
            assert_equal(fixture.cache.length(other), length + 2, "length of a fork")
            assert_equal(list(fixture.cache.positions(other)), [], "positions of a fork")


@check("TREE-11a", "tree")
def fork_returns_no_id_of_a_dropped_sequence(subject: Subject) -> None:
    subject.require_size(sequences=2)
    fixture = TreeFixture(subject, 2)
    fixture.require_new_ids(lambda: fixture.cache.fork(fixture.sequence))


@check("TREE-11b", "tree")
def calls_change_one_sequence(subject: Subject) -> None:
    subject.require_size(sequences=3)
    fixture = TreeFixture(subject, 5)
    relative, stranger = fixture.fork(fixture.sequence), fixture.create(2)
    everyone = [fixture.sequence, relative, stranger]

    def verify(after: str) -> None:
        for each in everyone:
            fixture.assert_contains(each, f"a sequence after {after}")
            fixture.assert_attends(each, range(-1, len(fixture.paths[each])), f"after {after}")

    for sequence, next_one in zip(everyone, [*everyone[1:], everyone[0]], strict=True):
        fixture.draft(sequence, [-1, -1, 1])
        fixture.draft(next_one, [-1, 0])
        verify("two drafts")
        fixture.accept(sequence, 2)
        verify("accept")
        fixture.reject(next_one)
        fixture.append(next_one, 1)
        verify("reject and append")
        fixture.truncate(sequence, 1)
        fixture.append(sequence, 1)
        verify("truncate and append")
    fixture.draft(relative, [-1])
    fixture.cache.drop(relative)
    everyone.remove(relative)
    verify("drop")


@check("TREE-11b", "tree")
def accept_writes_to_no_shared_block(subject: Subject) -> None:
    subject.require_size(sequences=2)
    for length in (1, 2, 3, 4):
        fixture = TreeFixture(subject, length)
        other = fixture.fork(fixture.sequence)
        for sequence in (fixture.sequence, other):
            fixture.draft(sequence, [-1, -1, 1])
        fixture.accept(fixture.sequence, 2)
        fixture.accept(other, 0)
        for sequence in (fixture.sequence, other):
            fixture.assert_contains(sequence, "a sequence after accept in two forks")


@check("TREE-12a", "tree")
def append_adds_to_the_committed_tokens(subject: Subject) -> None:
    fixture = TreeFixture(subject)
    for count in (3, 0, 1, 6):
        fixture.append(fixture.sequence, count)
        fixture.assert_contains(fixture.sequence, f"the tokens after append of {count}")
    other = fixture.create(2)
    assert_true(other != fixture.sequence, "the id of a second sequence", f"another than {fixture.sequence}", other)
    fixture.assert_contains(other, "a second sequence")
    fixture.assert_contains(fixture.sequence, "the first sequence")


@check("TREE-12a", "tree")
def create_returns_no_id_of_a_dropped_sequence(subject: Subject) -> None:
    fixture = TreeFixture(subject, 2)
    fixture.cache.drop(fixture.sequence)
    fixture.require_new_ids(fixture.cache.create)


@check("TREE-12b", "tree")
def truncate_keeps_the_first_tokens(subject: Subject) -> None:
    fixture = TreeFixture(subject, 9)
    for length in (9, 8, 4, 3, 0):
        for wrong in subject.integers(-1, len(fixture.rows[fixture.sequence][0]) + 1):
            with fixture.unchanged(), raises("PositionOutOfRange"):
                fixture.cache.truncate(fixture.sequence, wrong)
        fixture.truncate(fixture.sequence, length)
        fixture.assert_contains(fixture.sequence, f"the tokens after truncate to {length}")
        fixture.draft(fixture.sequence, [-1, -1])
        fixture.assert_attends(fixture.sequence, [-1, 0, 1], f"after truncate to {length}")
        fixture.reject(fixture.sequence)


@check("TREE-12c", "tree")
def dropped_sequences_are_unknown(subject: Subject) -> None:
    for parents in ([], [-1, 0]):
        fixture = TreeFixture(subject, 2)
        cache, row, query = fixture.cache, random_pair(subject, 1), random_pair(subject, 1)[0]
        dropped = fixture.sequence
        if parents:
            fixture.draft(dropped, parents)
        cache.drop(dropped)
        calls = {
            "length": (), "read": (), "positions": (), "reject": (), "fork": (), "drop": (), "ancestors": (0,), "accept": (0,),
            "truncate": (0,), "append": row, "draft": (*row, [-1]), "attend": ([-1], query, 1.0),
        }  # fmt: skip
        for sequence in (dropped, *unknown_ids(subject, dropped)):
            for name, arguments in calls.items():
                with suppress(NotOffered), raises("SequenceNotFound"):
                    getattr(cache, name)(sequence, *arguments)
        other = fixture.create(1)
        assert_equal(fixture.draft(other, [-1]), [0], "the number of the first node of a new sequence")
        fixture.assert_attends(other, [-1, 0], "after drop of another sequence")
