"""Break the code on purpose: the clause that names a bug must notice it. One that survives means that a check is missing."""

import pytest
from bugs import BUGS

from kvref.backend import ReferenceBackend
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.judge import Judge, select, verdict_of


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a bug may well divide by zero
@pytest.mark.parametrize(("plant", "clause"), BUGS)
def test_the_clause_notices(plant, clause, monkeypatch):
    plant(monkeypatch)
    ((_, checks),) = select(clause).items()
    written_out = [check for check in checks if check.run]
    assert verdict_of(Judge(OnBackend(ReferenceBackend())).clause(written_out)) == "failed"
