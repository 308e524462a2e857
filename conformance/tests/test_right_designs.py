"""Correct caches of unusual designs: no clause fails. A few are judged in the default tests, all of them in the extended ones."""

import numpy as np
import pytest
from right_designs import contiguous_designs, paged_designs, pool_designs, prefix_designs, windowed_designs

from kvref_conformance.runner.check_runner import CheckRunner, select_checks, verdict_of
from kvref_conformance.runner.options import Effort

MODULES = {
    "paged": paged_designs, "prefix": prefix_designs, "windowed": windowed_designs, "contiguous": contiguous_designs,
    "blocks": pool_designs,
}  # fmt: skip
DESIGNS = [pytest.param(family, design, id=design.__name__) for family, module in MODULES.items() for design in module.DESIGNS]
FEW = [
    each for each in DESIGNS
    if each.id in ("ParkedUntilSettle", "NullBlock", "SlotsOfEachRequest", "RadixTree", "Ring", "WaitsUntilSettle")
]  # fmt: skip
LARGE = ("LAW-18",)  # its checks take most of the time


class Implementation:
    version, language, level = "1", "python", "exact"

    def __init__(self, family, design):
        self.name, self.limits = design.__name__, MODULES[family].LIMITS.get(design.__name__, {})
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


@pytest.mark.parametrize(("family", "design"), FEW)
def test_no_clause_fails(family, design):
    found = verdicts(family, design, Effort(examples=4), LARGE)
    assert [clause for clause, verdict in found.items() if verdict == "failed"] == []
    assert sum(verdict == "passed" for verdict in found.values()) > len(found) * 2 // 3


@pytest.mark.extended
@pytest.mark.parametrize(("family", "design"), DESIGNS)
def test_no_clause_fails_at_default_options(family, design):
    found = verdicts(family, design, Effort())
    assert [clause for clause, verdict in found.items() if verdict == "failed"] == []
