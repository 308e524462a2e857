"""Caches with few operations and kernels with few sizes: every clause that they can show is judged, and every bug is found."""

from functools import cache

import pytest
from api_subsets import broken_kernels, broken_paged, broken_quantized
from api_subsets.append_only import AppendOnly
from api_subsets.breaking import BROKEN
from api_subsets.fp8 import Fp8
from api_subsets.int8 import Int8
from api_subsets.kernel_attention import KernelAttention
from api_subsets.kernel_paged import KernelPaged
from api_subsets.one_table import OneTable
from api_subsets.paged import Paged

from kvref_conformance.implementation_api import offers
from kvref_conformance.runner.check_runner import CheckRunner, Failure, select_checks, verdict_of
from kvref_conformance.runner.options import Effort

EXAMPLES = 8  # call sequences per state machine

# Clauses about forks, truncation or freeing, which paged caches without these operations cannot show.
SHARING = {"SHARE-03", "SHARE-04", "SHARE-05", "SHARE-06", "SHARE-07", "SHARE-08", "SHARE-09"}
EDITS = {"EDIT-01", "EDIT-02", "EDIT-03", "EDIT-04", "EDIT-05", "EDIT-06", "EDIT-10"}
RELEASE = {"WIN-09"}
MOVING = {"MOVE-01", "MOVE-02", "MOVE-03", "MOVE-04", "MOVE-07"}
SCALES = {"PAGED-18", "MOVE-05", *MOVING}  # of caches with plain dtypes that are not saved
# For each API subset, the clauses with checks in its family that it cannot show.
OF_FORMATS = {"FMT-STATIC-05", "FMT-STATIC-06", "FMT-STATIC-08", "FMT-ROT-04", "FMT-ROT-07"}  # of caches in these formats
GIVEN = {"FMT-STATIC-05", "FMT-STATIC-06"}  # given scales
WITHOUT = SCALES | GIVEN | SHARING | EDITS | RELEASE
NOT_JUDGED = {
    Paged: {"PAGED-06", "PAGED-16", "PAGED-17", "ATTN-10"} | SCALES | GIVEN | SHARING | EDITS | RELEASE,
    Int8: {"LAW-06", "LAW-13", "QUANT-04", "QUANT-08", "EDIT-01", "EDIT-02", "EDIT-03", "ATTN-10", "QUANT-10"}
    | OF_FORMATS
    | MOVING,
    Fp8: {"LAW-06", "LAW-13", "QUANT-04", "EDIT-01", "EDIT-02", "EDIT-03", "ATTN-10", "QUANT-10"} | OF_FORMATS | MOVING,
    KernelAttention: {"WIN-01", "WIN-05", "WIN-07", "WIN-08"},
    KernelPaged: SCALES | GIVEN | SHARING | EDITS | RELEASE,
    AppendOnly: {"LAW-06", "PAGED-04", "PAGED-06", "PAGED-10", "PAGED-11", "PAGED-15", "PAGED-17", "ATTN-10"}
    | SCALES
    | GIVEN
    | SHARING
    | EDITS
    | RELEASE,
    OneTable: {"PAGED-04", "PAGED-06", "PAGED-15", "PAGED-16", "PAGED-17", "ATTN-10"}
    | SCALES
    | GIVEN
    | SHARING
    | EDITS
    | RELEASE,
}
JUDGED = {
    (Paged, "PAGED"): 14, (Int8, "QUANT"): 6, (Fp8, "QUANT"): 7, (KernelAttention, "ATTN"): 9, (KernelPaged, "PAGED"): 17,
    (KernelPaged, "ATTN"): 1, (AppendOnly, "PAGED"): 11, (OneTable, "PAGED"): 12,
}  # fmt: skip


@cache
def said_of(right):
    """The outcomes of all clauses with checks in the family, without production sizes (LAW-18), which take seconds each."""
    implementation = right()
    judge, found = CheckRunner(implementation, Effort(examples=EXAMPLES)), {}
    for clause, checks in select_checks().items():
        of_family = [check for check in checks if offers(implementation, check.family)]
        if of_family and clause.id != "LAW-18":
            found[clause.id] = judge.judge_clause(of_family)
    return found


@pytest.mark.parametrize("right", NOT_JUDGED)
def test_a_right_one_passes_whatever_it_can_show(right):
    verdicts = {clause: verdict_of(outcomes) for clause, outcomes in said_of(right).items()}
    assert {clause: said_of(right)[clause] for clause, verdict in verdicts.items() if verdict == "failed"} == {}
    assert {clause for clause, verdict in verdicts.items() if verdict != "passed"} == NOT_JUDGED[right]


@pytest.mark.parametrize(("right", "chapter"), JUDGED)
def test_so_much_of_a_chapter_is_judged(right, chapter):
    of_chapter = {clause: outcomes for clause, outcomes in said_of(right).items() if clause.startswith(f"{chapter}-")}
    assert [verdict_of(outcomes) for outcomes in of_chapter.values()].count("passed") == JUDGED[right, chapter]


@pytest.mark.parametrize("right", NOT_JUDGED)
def test_what_is_not_judged_says_why(right):
    implementation = right()
    judge = CheckRunner(implementation)
    for clause in NOT_JUDGED[right]:
        ((_, checks),) = select_checks(clause).items()
        assert judge.missing([c for c in checks if offers(implementation, c.family)], said_of(right)[clause]), clause


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a bug can divide by zero
@pytest.mark.parametrize(("broken", "clause"), BROKEN)
def test_a_bug_is_caught(broken, clause):
    judge, ((_, checks),) = CheckRunner(broken, Effort(examples=20)), select_checks(clause).items()
    written_out = [check for check in checks if check.run and offers(broken, check.family)]
    caught = any(isinstance(judge.judge_check(check), Failure) for check in written_out)
    assert caught or clause in judge.search(written_out[0].family).findings


def test_there_are_many_in_every_one():
    assert broken_kernels, broken_paged  # imported for their classes, which register the bugs
    assert broken_quantized
    assert len(BROKEN) >= 50
    assert {type(param.values[0]).__mro__[1] for param in BROKEN} == set(NOT_JUDGED)
