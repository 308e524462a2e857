"""What the checks of the tree cache share."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.testlib.assertions import (
    assert_equal,
    assert_pair,
    assert_true,
    assert_within,
    default_scale,
    expected_attention,
    random_queries,
    unstated_scale,
)
from kvref_conformance.testlib.fixtures import random_pair
from kvref_conformance.testlib.session import Session

Rows = tuple[NDArray, NDArray]  # keys and values [n, num_kv_heads, head_dim]

# The parents of a tree whose paths skip rows, and whose numbers do not follow the levels.
BRANCHES = (-1, -1, 0, 1, 0, 3, -1, 2, 4)
# The parents of 150 nodes, with paths of up to 75 nodes: too many for a mask of 64 or 128 bits. Every fifth node from 65 on is a
# sibling of the node before it.
DEEP = tuple(
    -1 if node < 3 else node // 3 - 1 if node < 65 and node % 5 else node - 1 - (node > 64 and node % 5 == 0)
    for node in range(150)
)


class TreeFixture(Session):
    """A cache with one sequence, and all rows that were added to it."""

    def __init__(self, subject: Subject, count: int = 0, **sizes: Any) -> None:
        super().__init__(subject, **sizes)
        self.config = self.cache.config
        self.size = int(self.config["block_size"])
        self.rows: dict[int, Rows] = {}
        self.nodes: dict[int, Rows] = {}
        self.paths: dict[int, list[list[int]]] = {}
        self.sequence = self.create(count)

    def create(self, count: int = 0) -> int:
        """Create a sequence with `count` tokens. Returns its id."""
        return self._added(int(self.cache.create()), count)

    def fork(self, sequence: int) -> int:
        """Fork a sequence. Returns the id of the new one."""
        other = int(self.cache.fork(sequence))
        self._added(other, 0)
        self.rows[other] = self.rows[sequence]
        return other

    def _added(self, sequence: int, count: int) -> int:
        self.rows[sequence] = random_pair(self.subject, 0)
        self._close(sequence)
        if count:
            self.append(sequence, count)
        return sequence

    def append(self, sequence: int, count: int) -> None:
        new = random_pair(self.subject, count)
        self.cache.append(sequence, *new)
        self.rows[sequence] = _joined(self.rows[sequence], new)

    def draft(self, sequence: int, parents: Sequence[int], rows: Rows | None = None) -> list[int]:
        """Add nodes with random rows, or these. Returns the numbers that `draft` returned."""
        new = random_pair(self.subject, len(parents)) if rows is None else rows
        numbers = [int(each) for each in self.cache.draft(sequence, *new, list(parents))]
        paths = self.paths[sequence]
        for parent in parents:
            paths.append([*(paths[parent] if parent >= 0 else []), len(paths)])
        self.nodes[sequence] = _joined(self.nodes[sequence], new)
        return numbers

    def accept(self, sequence: int, node: int) -> None:
        path = self.paths[sequence][node]
        self.cache.accept(sequence, node)
        keys, values = (part[path] for part in self.nodes[sequence])
        self.rows[sequence] = _joined(self.rows[sequence], (keys, values))
        self._close(sequence)

    def reject(self, sequence: int) -> None:
        self.cache.reject(sequence)
        self._close(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        self.cache.truncate(sequence, length)
        keys, values = self.rows[sequence]
        self.rows[sequence] = keys[:length], values[:length]

    def _close(self, sequence: int) -> None:
        self.nodes[sequence], self.paths[sequence] = random_pair(self.subject, 0), []

    def assert_contains(self, sequence: int, what: str) -> None:
        """Raise ClauseViolation unless `read` returns the committed tokens."""
        assert_pair(self.cache.read(sequence), self.rows[sequence], what)

    def assert_free(self, blocks: int, when: str) -> None:
        assert_equal(self.cache.num_free_blocks, blocks, f"free blocks {when}")

    def assert_attends(self, sequence: int, nodes: Sequence[int], what: str, stated: bool = True) -> None:
        """Raise ClauseViolation unless the query of each node attends over the committed tokens and its path.

        stated: whether the call has a scale.
        """
        query = random_queries(self.subject, len(nodes))
        scale = default_scale(self.subject) if stated else unstated_scale(self.subject)
        got = np.asarray(self.cache.attend(sequence, list(nodes), query, *([scale] if stated else [])))
        for at, node in enumerate(nodes):
            path = self.paths[sequence][node] if node >= 0 else []
            own, drafts = self.rows[sequence], tuple(part[path] for part in self.nodes[sequence])
            keys, values = (np.concatenate(each) for each in zip(own, drafts, strict=True))
            where = f"attention of node {node} with the path {path} after {len(own[0])} tokens, {what}"
            if not len(keys):
                assert_true(not got[at].any(), where, "zeros", "other values")
                continue
            want, bound = expected_attention(self.subject, query[at : at + 1], keys, values, scale=scale)
            assert_within(got[at : at + 1], want, bound, where)

    def need_blocks(self, blocks: int) -> None:
        if self.config["num_blocks"] < blocks:
            raise NotOffered(f"{blocks} blocks, where its limits leave {self.config['num_blocks']}")

    @classmethod
    def with_deep_tree(cls, subject: Subject) -> "TreeFixture":
        """A sequence with 7 tokens and the tree DEEP, which begins within a block."""
        blocks = -(-(7 + len(DEEP)) // subject.size("block_size", 4))
        fixture = cls(subject, 7, num_blocks=blocks)
        fixture.need_blocks(blocks)
        fixture.draft(fixture.sequence, DEEP)
        return fixture

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Observe everything before and after the calls of the block: nothing must have changed."""
        before = self.observed()
        yield
        assert_equal(self.observed(), before, "all that can be observed, before and after a call that raises")

    def observed(self) -> dict[str, Any]:
        """All observables of all sequences that are offered."""
        found: dict[str, Any] = {}
        with self.subject.quiet_reads():
            for name, args in self.model.observations():
                try:
                    got = getattr(self.cache, name)
                    got = got(**args) if callable(got) else got
                except NotOffered:
                    continue
                found[f"{name} {list(args.values())}"] = (
                    str([np.asarray(each).tolist() for each in got]) if name == "read" else got
                )
        return found


def _joined(first: Rows, second: Rows) -> Rows:
    keys, values = (np.concatenate(parts) for parts in zip(first, second, strict=True))
    return keys, values
