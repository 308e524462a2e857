"""Caches that are block tables only: a correct one never fails, and a wrong one does, by what its blocks would contain."""

import numpy as np
import pytest

import kvref
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.runner.check_runner import CheckRunner, select_checks
from kvref_conformance.runner.options import Effort


class Tables:
    """kvref's prefix cache without writes and reads. Allocated blocks count as written, so that all tokens can be committed."""

    def __init__(self, **config):
        self.cache = kvref.PrefixCache(kvref.PagedConfig(**config))
        self.layers, self.row = range(config["num_layers"]), (config["num_kv_heads"], config["head_dim"])
        self.hits = {}

    num_free_blocks = property(lambda self: self.cache.num_free_blocks)
    utilization = property(lambda self: self.cache.utilization)

    def create(self):
        return self.cache.create()

    def drop(self, sequence):
        self.cache.drop(sequence)
        self.hits.pop(sequence, None)

    def release_before(self, sequence, position):
        self.cache.release_before(sequence, position)

    def ensure_capacity(self, sequence, num_tokens):
        self.cache.ensure_capacity(sequence, num_tokens)
        for layer in self.layers:
            length = self.cache.length(sequence, layer)
            rows = np.zeros((max(0, num_tokens - length), *self.row), np.float32)
            self.cache.write(sequence, layer, length, rows, rows)

    def block_table(self, sequence, layer):
        return self.cache.block_table(sequence, layer)

    def begin(self, tokens, salt=""):
        sequence = self.cache.begin(tokens, salt)
        self.hits[sequence] = self.cache.length(sequence, 0)
        self.ensure_capacity(sequence, len(tokens))
        return sequence

    def length(self, sequence, layer):
        self.cache.length(sequence, layer)  # raises for unknown ones
        if sequence not in self.hits:
            raise NotOffered("lengths of what was not begun")
        return self.hits[sequence]

    def commit(self, sequence, tokens):
        self.cache.commit(sequence, tokens)

    def match(self, tokens, salt=""):
        return self.cache.match(tokens, salt)

    def reset(self):
        self.cache.reset()


class SharesNothing(Tables):
    """It reports the hit, but returns blocks that do not contain it."""

    def begin(self, tokens, salt=""):
        sequence = self.create()
        self.hits[sequence] = self.match(tokens, salt)
        self.ensure_capacity(sequence, len(tokens))
        return sequence


class Leaks(Tables):
    def drop(self, sequence):
        self.cache.fork(sequence)
        super().drop(sequence)


class TakesTheFirst(Tables):
    """A table whose first two entries are the same block."""

    def block_table(self, sequence, layer):
        table = super().block_table(sequence, layer)
        return [*table[:1], *table[:1], *table[2:]]


class DealsAnew(Tables):
    """The order of its blocks changes each time a block is added."""

    def block_table(self, sequence, layer):
        table = super().block_table(sequence, layer)
        return [*table[len(table) // 2 :], *table[: len(table) // 2]]


class MovesUp(Tables):
    """The order of the remaining blocks changes after blocks were freed."""

    def block_table(self, sequence, layer):
        table = [int(block) for block in super().block_table(sequence, layer)]
        left = [block for block in table if block >= 0]
        return table if len(left) == len(table) else [*([-1] * (len(table) - len(left))), *reversed(left)]


def failed(tables, clauses):
    """The clauses that fail, and the number of clauses that pass."""

    class Alone(OnBackend):
        paged = prefix = staticmethod(tables)

    alone = Alone(kvref.reference)
    alone.limits = {"tables_alone": True}
    judge = CheckRunner(alone, Effort(examples=6))
    said = {clause.id: [each.verdict for each in judge.judge_clause(checks)] for clause, checks in judged(clauses)}
    broken = {id for id, verdicts in said.items() if "failed" in verdicts}
    return broken, len({id for id, verdicts in said.items() if "passed" in verdicts} - broken)


def judged(clauses):
    return [(clause, checks) for clause, checks in select_checks(clauses, "prefix").items() if checks]


def test_a_right_one_is_not_blamed():
    broken, passed = failed(Tables, "PREFIX-*,PAGED-*,WIN-09,LAW-03,LAW-12")
    assert not broken
    assert passed >= 18


@pytest.mark.extended
@pytest.mark.parametrize(
    ("tables", "clause"),
    [
        pytest.param(SharesNothing, "PREFIX-01", marks=pytest.mark.long),
        pytest.param(SharesNothing, "PREFIX-03", marks=pytest.mark.long),
        (Leaks, "PAGED-07"),
        (Leaks, "PREFIX-06"),
        (TakesTheFirst, "LAW-03"),
        (DealsAnew, "PAGED-04"),
        (MovesUp, "WIN-09"),
    ],
)
def test_a_wrong_one_is(tables, clause):
    assert failed(tables, clause)[0] == {clause}
