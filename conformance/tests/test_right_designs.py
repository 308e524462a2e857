"""Correct caches of unusual designs: no clause fails.

A few are judged in the default tests, all of them with few call sequences in the extended ones, and with the default options of
`kvref check` in the long ones.
"""

import numpy as np
import pytest
from right_designs import attention_designs, contiguous_designs, paged_designs, pool_designs, prefix_designs, windowed_designs
from right_designs.simple_paged import Paged

from kvref_conformance.calls.messages import CallRequest
from kvref_conformance.runner.check_runner import CheckRunner, select_checks, verdict_of
from kvref_conformance.runner.options import Effort

MODULES = {
    "paged": paged_designs, "prefix": prefix_designs, "windowed": windowed_designs, "contiguous": contiguous_designs,
    "blocks": pool_designs, "attention": attention_designs,
}  # fmt: skip
DESIGNS = [pytest.param(family, design, id=design.__name__) for family, module in MODULES.items() for design in module.DESIGNS]
IN_DEFAULT_TESTS = (
    "ParkedUntilSettle",
    "NullBlock",
    "SlotsOfEachRequest",
    "RadixTree",
    "TokenTree",
    "Ring",
    "WaitsUntilSettle",
    "RoundedWeights",
)
LARGE = ("LAW-18",)  # its checks take most of the time


class Implementation:
    version, language, level = "1", "python", "exact"

    def __init__(self, family, design, limits=None):
        self.name = design.__name__
        self.limits = MODULES[family].LIMITS.get(design.__name__, {}) if limits is None else limits
        self.formats = (self.limits.get("dtype", "float32"),)
        setattr(self, family, design)

    def asarray(self, values):
        return np.array(values)

    def to_numpy(self, array):
        return np.asarray(array)


def verdicts(family, design, effort, without=()):
    """The verdict of each clause of the family. without: clauses that are left out."""
    judge = CheckRunner(Implementation(family, design), effort)
    clauses = {clause.id: checks for clause, checks in select_checks("*", family).items() if clause.id not in without}
    return {clause: verdict_of(judge.judge_clause(checks)) for clause, checks in clauses.items()}


class SettleForgetsABlock(paged_designs.ParkedUntilSettle):
    def settle(self):
        del self.parked[:1]
        super().settle()


class NullBlockIsAllocated(paged_designs.NullBlock):
    def make_free_list(self):
        return list(range(self.total))


class FreedTooEarly(pool_designs.WaitsUntilSettle):
    """Settles the block of a reference, not of the last one."""

    def free(self, block):
        super().free(block)
        if self.references_of.pop(block, None):
            self.give_back(int(block))


class EightBitWeights(attention_designs.RoundedWeights):
    def rounded(self, weights):
        return np.rint(weights * 256) / np.float32(256)


class RefusesARepeatedSequence(Paged):
    """Raises if one batch contains a sequence twice."""

    def append_to(self, layers, sequences, keys, values):
        if len(set(sequences)) < len(sequences):
            raise ValueError("a sequence twice in one batch")
        super().append_to(layers, sequences, keys, values)


def verdict(family, design, clause, limits):
    """The verdict of a clause, by its hand-written checks."""
    judge = CheckRunner(Implementation(family, design, limits), Effort(shrinks=False))
    ((_, checks),) = select_checks(clause, family).items()
    return verdict_of(judge.judge_clause([check for check in checks if check.run]))


@pytest.mark.parametrize(
    ("family", "design", "clause", "declared", "with_it"),
    [
        ("paged", paged_designs.ParkedUntilSettle, "PAGED-07", {"settle": True}, "passed"),
        ("paged", SettleForgetsABlock, "PAGED-07", {"settle": True}, "failed"),
        ("blocks", pool_designs.WaitsUntilSettle, "BLOCK-04", {"settle": True}, "passed"),
        ("blocks", FreedTooEarly, "SHARE-01", {"settle": True}, "failed"),
        ("paged", paged_designs.NullBlock, "PAGED-13", {"null_block": True}, "passed"),
        ("paged", NullBlockIsAllocated, "PAGED-13", {"null_block": True}, "failed"),
        ("paged", RefusesARepeatedSequence, "PAGED-16", {"repeated_sequences": False}, "passed"),
        ("attention", attention_designs.RoundedWeights, "ATTN-04", {"dtype": "float16", "rounded_weights": True}, "passed"),
        ("attention", EightBitWeights, "ATTN-04", {"dtype": "float16", "rounded_weights": True}, "failed"),
    ],
)
def test_a_declared_choice_is_judged(family, design, clause, declared, with_it):
    assert verdict(family, design, clause, declared) == with_it
    if with_it == "failed":
        return
    undeclared = {name: value for name, value in declared.items() if name == "dtype"}
    assert verdict(family, design, clause, undeclared) == "failed"


@pytest.mark.parametrize(
    ("design", "expected"),
    [(paged_designs.OneWindowInAllLayers, "passed"), (paged_designs.OneWindowThatFreesTooMuch, "failed")],
)
def test_a_pool_with_one_window_is_judged_as_a_paged_cache(design, expected):
    assert verdict("paged", design, "WIN-09", {}) == expected


@pytest.mark.parametrize(
    ("family", "design"),
    [
        pytest.param(*each.values, id=each.id, marks=() if each.id in IN_DEFAULT_TESTS else pytest.mark.extended)
        for each in DESIGNS
    ],
)
def test_no_clause_fails(family, design):
    found = verdicts(family, design, Effort(examples=4), LARGE)
    assert [clause for clause, verdict in found.items() if verdict == "failed"] == []
    # `FewOperations` offers four operations, so that many clauses are not offered.
    least = 1 / 2 if design is paged_designs.FewOperations else 2 / 3
    assert sum(verdict == "passed" for verdict in found.values()) >= len(found) * least


ROWS = np.ones((6, 1, 2), np.float32)
RELEASED = [  # of a full pool of three blocks, of which the first two are released
    (None, "new", {"num_blocks": 3, "block_size": 2, "num_layers": 1, "num_kv_heads": 1, "head_dim": 2, "dtype": "float32"}),
    (1, "begin", {"tokens": [1, 2, 3, 4, 5, 6]}),
    (1, "block_table", {"sequence": 0, "layer": 0}),
    (1, "write", {"sequence": 0, "layer": 0, "start": 0, "keys": ROWS, "values": ROWS}),
    (1, "commit", {"sequence": 0, "tokens": [1, 2, 3, 4, 5, 6]}),
    (1, "release_before", {"sequence": 0, "position": 4}),
    (1, "write", {"sequence": 0, "layer": 0, "start": 6, "keys": ROWS[:1], "values": ROWS[:1]}),
    (1, "block_table", {"sequence": 0, "layer": 0}),
]


class ReleasesTheLastFirst(prefix_designs.ChainedHashes):
    def unlist(self, entries):
        super().unlist(entries)
        self.evictable = type(self.evictable)(reversed(self.evictable.items()))


@pytest.mark.parametrize("design", [prefix_designs.ChainedHashes, ReleasesTheLastFirst])
def test_of_blocks_that_one_release_frees_any_one_is_evicted_first(design):
    calls = [CallRequest(id, f"prefix.{name}", on, args) for id, (on, name, args) in enumerate(RELEASED, 1)]
    found = CheckRunner(Implementation("prefix", design)).replay(calls)
    assert found.violation is None
    first, last = (found.call_trace[at].reply.ok for at in (2, -1))
    assert last[-1] == first[design is ReleasesTheLastFirst]


@pytest.mark.long
@pytest.mark.parametrize(("family", "design"), DESIGNS)
def test_no_clause_fails_at_default_options(family, design):
    found = verdicts(family, design, Effort())
    assert [clause for clause, verdict in found.items() if verdict == "failed"] == []
