"""Break the code on purpose: the clause that names a bug must notice it. One that survives means that a check is missing."""

import pytest
from bugs import BUGS

from kvref.backend import ReferenceBackend
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.judge import run_clause, select, verdict_of


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a bug may well divide by zero
@pytest.mark.parametrize(("plant", "clause"), BUGS)
def test_the_clause_notices(plant, clause, monkeypatch):
    plant(monkeypatch)
    ((_, checks),) = select(clause).items()
    outcomes = run_clause(checks, OnBackend(ReferenceBackend()), seed=0, slow=False)
    assert verdict_of(outcomes) == "failed"
