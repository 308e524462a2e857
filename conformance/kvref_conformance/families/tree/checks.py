"""Checks of TREE-01 to TREE-06: drafts, and what they see."""

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.tree.fixture import BRANCHES, TreeFixture
from kvref_conformance.testlib.assertions import assert_equal, may_raise, raises, random_queries
from kvref_conformance.testlib.fixtures import random_pair
from kvref_conformance.testlib.registry import check


@check("TREE-01a", "tree")
def draft_returns_the_numbers_of_its_nodes(subject: Subject) -> None:
    fixture = TreeFixture(subject, 3)
    assert_equal(fixture.draft(fixture.sequence, [-1, -1, 0]), [0, 1, 2], "the numbers of the first 3 nodes")
    assert_equal(fixture.draft(fixture.sequence, []), [], "the numbers of no nodes")
    assert_equal(fixture.draft(fixture.sequence, [2]), [3], "the number of node 3")
    assert_equal(fixture.draft(fixture.sequence, [-1, 1]), [4, 5], "the numbers of 2 nodes after 4 others")


@check("TREE-01b", "tree")
def draft_adds_levels_to_the_tree(subject: Subject) -> None:
    fixture = TreeFixture(subject, 2)
    for level in ([-1, -1, -1], [2, 0], [3, 3, 4], [7, -1]):
        fixture.draft(fixture.sequence, level)
    for node, path in enumerate([[0], [1], [2], [2, 3], [0, 4], [2, 3, 5], [2, 3, 6], [0, 4, 7], [0, 4, 7, 8], [9]]):
        assert_equal(list(fixture.cache.ancestors(fixture.sequence, node)), path, f"ancestors of node {node} of four calls")


@check("TREE-01b", "tree")
def nodes_of_several_calls_see_each_other(subject: Subject) -> None:
    fixture = TreeFixture(subject, 2)
    for level in ([-1, -1], [1, 0], [2, 3]):
        fixture.draft(fixture.sequence, level)
    fixture.assert_attends(fixture.sequence, range(6), "in a tree of three calls")


@check("TREE-02ac", "tree")
def draft_with_a_parent_that_does_not_exist_raises(subject: Subject) -> None:
    fixture = TreeFixture(subject, 3)
    for before in (0, 2):
        for wrong in subject.integers(-2, before + 1, before + 2, before + 3, 10**6):
            with fixture.unchanged(), raises("PositionOutOfRange"):
                fixture.draft(fixture.sequence, [-1, wrong, -1])
        for wrong in (before, before + 1):
            with fixture.unchanged(), raises("PositionOutOfRange"):
                fixture.draft(fixture.sequence, [wrong, -1])
        assert_equal(fixture.draft(fixture.sequence, [-1, before]), [before, before + 1], "the numbers of nodes after errors")
    fixture.look()


@check("TREE-02bc", "tree")
def draft_with_another_number_of_parents_raises(subject: Subject) -> None:
    fixture = TreeFixture(subject, 1)
    for before in (0, 1):
        for count, parents in ((2, [-1]), (2, [-1, 0, 0]), (1, []), (0, [-1])):
            with fixture.unchanged(), raises("ShapeMismatch"):
                fixture.cache.draft(fixture.sequence, *random_pair(subject, count), parents)
        assert_equal(fixture.draft(fixture.sequence, [-1]), [before], "the number of a node after errors")


@check("TREE-03", "tree")
def siblings_have_the_same_position(subject: Subject) -> None:
    for length in (1, 4, 5):
        _verify_positions(TreeFixture(subject, length), length)


@check("TREE-03", "tree")
def roots_of_an_empty_sequence_are_at_position_0(subject: Subject) -> None:
    _verify_positions(TreeFixture(subject, 0), 0)


def _verify_positions(fixture: TreeFixture, length: int) -> None:
    positions = fixture.cache.positions
    assert_equal(list(positions(fixture.sequence)), [], "positions without a tree")
    for parents, depths in (([-1, -1, 1, 0], [0, 0, 1, 1]), ([2, -1], [2, 0]), ([4, 4, 5], [3, 3, 1])):
        fixture.draft(fixture.sequence, parents)
        want = [length + each for each in depths]
        got = list(positions(fixture.sequence))
        assert_equal(got[-len(want) :], want, f"the last positions of a tree after {length} tokens")
        assert_equal(len(got), len(fixture.paths[fixture.sequence]), "the number of positions")


@check("TREE-03", "tree")
def positions_in_a_large_tree_are_those_of_the_paths(subject: Subject) -> None:
    fixture = TreeFixture.with_deep_tree(subject)
    want = [7 + len(path) - 1 for path in fixture.paths[fixture.sequence]]
    assert_equal(list(fixture.cache.positions(fixture.sequence)), want, "the positions of a tree of 150 nodes after 7 tokens")


@check("TREE-04a", "tree")
def ancestors_returns_the_path(subject: Subject) -> None:
    fixture = TreeFixture(subject, 3)
    fixture.draft(fixture.sequence, BRANCHES)
    paths = [[0], [1], [0, 2], [1, 3], [0, 4], [1, 3, 5], [6], [0, 2, 7], [0, 4, 8]]
    for node, path in enumerate(paths):
        assert_equal(list(fixture.cache.ancestors(fixture.sequence, node)), path, f"ancestors of node {node}")


@check("TREE-04a", "tree")
def ancestors_in_a_large_tree_returns_the_path(subject: Subject) -> None:
    fixture = TreeFixture.with_deep_tree(subject)
    for node, path in enumerate(fixture.paths[fixture.sequence]):
        assert_equal(list(fixture.cache.ancestors(fixture.sequence, node)), path, f"ancestors of node {node} of 150")


@check("TREE-04b", "tree")
def ancestors_of_unknown_nodes_raise(subject: Subject) -> None:
    fixture = TreeFixture(subject, 3)
    for count in (0, 2):
        fixture.draft(fixture.sequence, [-1] * count)
        for node in subject.integers(-1, -2, count, count + 1, 10**6):
            with raises("PositionOutOfRange"):
                fixture.cache.ancestors(fixture.sequence, node)


@check("TREE-05a", "tree")
def attend_sees_the_path(subject: Subject) -> None:
    for length in (1, 4, 6):
        fixture = TreeFixture(subject, length)
        fixture.draft(fixture.sequence, BRANCHES)
        fixture.assert_attends(fixture.sequence, range(len(BRANCHES)), "in a tree")
        fixture.assert_attends(fixture.sequence, [8, 0, 5, 5, -1, 7], "with queries in another order")


@check("TREE-05ac", "tree")
def attend_without_committed_tokens_sees_the_path(subject: Subject) -> None:
    fixture = TreeFixture(subject, 0)
    fixture.assert_attends(fixture.sequence, [-1], "without a tree")
    fixture.draft(fixture.sequence, BRANCHES)
    fixture.assert_attends(fixture.sequence, [8, 0, 5, 5, -1, 7], "in a tree without committed tokens")


@check("TREE-05a", "tree")
def attend_with_a_large_tree_sees_the_path(subject: Subject) -> None:
    """More nodes than a tile has rows, and than a mask of 64 or 128 bits. Every path contains nodes of the first tiles."""
    fixture = TreeFixture.with_deep_tree(subject)
    fixture.assert_attends(fixture.sequence, [*range(0, 65, 3), *range(65, 150, 4), 149], "in a tree of 150 nodes")


@check("TREE-05b", "tree")
def attend_ignores_other_nodes_that_contain_nan(subject: Subject) -> None:
    for number in (np.nan, np.inf):
        fixture = TreeFixture(subject, 3)
        keys, values = random_pair(subject, len(BRANCHES))
        path = [0, 2, 7]
        others = [node for node in range(len(BRANCHES)) if node not in path]
        keys[others], values[others] = number, number
        with may_raise("NonFinite"):
            fixture.draft(fixture.sequence, BRANCHES, (keys, values))
        if fixture.paths[fixture.sequence]:  # LAW-14 permits the error
            fixture.assert_attends(fixture.sequence, [*path, -1], f"where other nodes contain {number}")


@check("TREE-05b", "tree")
def attend_ignores_siblings(subject: Subject) -> None:
    """Rows of other nodes at the ends of blocks, between those of the path, and after it."""
    for count in (1, 2, 5):
        fixture = TreeFixture(subject, 1)
        fixture.draft(fixture.sequence, [-1] * count)
        fixture.draft(fixture.sequence, [count - 1] * count)
        fixture.draft(fixture.sequence, [count, count])
        for node in (0, count - 1, count, 2 * count - 1, 2 * count, 2 * count + 1):
            fixture.assert_attends(fixture.sequence, [node], f"beside {count - 1} siblings")


@check("TREE-05c", "tree")
def attend_of_the_last_committed_token_sees_no_node(subject: Subject) -> None:
    fixture = TreeFixture(subject, 3)
    fixture.assert_attends(fixture.sequence, [-1], "without a tree")
    fixture.assert_attends(fixture.sequence, [-1], "without a scale", stated=False)
    fixture.draft(fixture.sequence, [-1, 0, -1])
    fixture.assert_attends(fixture.sequence, [-1, -1], "with a tree of 3 nodes")


@check("TREE-05d", "tree")
def attend_with_wrong_nodes_raises(subject: Subject) -> None:
    fixture = TreeFixture(subject, 3)
    for count in (0, 2):
        fixture.draft(fixture.sequence, [-1] * count)
        for nodes in ([-1], [-1] * 3, []):
            with raises("ShapeMismatch"):
                fixture.cache.attend(fixture.sequence, nodes, random_queries(subject, 2), 1.0)
        for node in subject.integers(-2, count, count + 1, 10**6):
            with raises("PositionOutOfRange"):
                fixture.cache.attend(fixture.sequence, [-1, node], random_queries(subject, 2), 1.0)
    fixture.assert_attends(fixture.sequence, [-1, 0, 1], "after errors")


@check("TREE-06", "tree")
def drafts_are_not_read(subject: Subject) -> None:
    for length in (3, 4):
        _verify_committed(TreeFixture(subject, length), length)


@check("TREE-06", "tree")
def drafts_of_an_empty_sequence_are_not_read(subject: Subject) -> None:
    _verify_committed(TreeFixture(subject, 0), 0)


def _verify_committed(fixture: TreeFixture, length: int) -> None:
    for parents in ([-1], [0, -1, 0, 1], [4] * 5):
        fixture.draft(fixture.sequence, parents)
        assert_equal(fixture.cache.length(fixture.sequence), length, f"length with a tree after {length} tokens")
        fixture.assert_contains(fixture.sequence, "committed tokens, with an open tree")
