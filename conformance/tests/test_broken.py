"""Break the code on purpose: the clause that names a bug must notice it. One that survives means that a check is missing."""

import pytest
from bugs import BUGS, HIDDEN, REAL

from kvref.backend import ReferenceBackend
from kvref_conformance.checking.registry import all_checks
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.judging.asked import Effort
from kvref_conformance.judging.judge import Failure, Judge, select, verdict_of


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a bug may well divide by zero
@pytest.mark.parametrize(("plant", "clause"), BUGS)
def test_the_clause_notices(plant, clause, monkeypatch):
    plant(monkeypatch)
    ((_, checks),) = select(clause).items()
    written_out = [check for check in checks if check.run]
    assert verdict_of(Judge(OnBackend(ReferenceBackend())).clause(written_out)) == "failed"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("plant", "clause"), HIDDEN)
def test_a_machine_finds_it_alone(plant, clause, monkeypatch):
    plant(monkeypatch)
    judge = Judge(OnBackend(ReferenceBackend()))
    families = {check.family for check in all_checks() if check.clause == clause and check.run is None}
    assert any(clause in judge.search(family).findings for family in families)


def failing(judge, checks):
    """The names of those that fail, as they are asked; nothing is made shorter."""
    return (check.name for check in checks if isinstance(judge.ask_about(check), Failure))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("plant", "family"), REAL)
def test_only_real_sizes_show_it(plant, family, monkeypatch):
    plant(monkeypatch)
    judge = Judge(OnBackend(ReferenceBackend()), Effort(examples=10, real=True))
    checks = [check for check in all_checks() if check.family == family and not check.slow]
    assert list(failing(judge, [check for check in checks if check.clause != "LAW-18"])) == []
    at_real_sizes = sorted((check for check in checks if check.clause == "LAW-18"), key=lambda check: check.real)
    assert next(failing(judge, at_real_sizes), None)
