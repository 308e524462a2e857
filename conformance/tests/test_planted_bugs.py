"""Planted bugs: each must be noticed by the clause that names it. If a bug survives, a check is missing."""

import pytest
from bugs import BUGS, DEFERRED, HIDDEN, REAL
from marks import half_long

import kvref_zoo
from kvref.backend import ReferenceBackend
from kvref_conformance.clauses import all_clauses
from kvref_conformance.fuzz.findings import Search
from kvref_conformance.fuzz.hypothesis_runner import run_machine
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.runner.check_runner import CheckRunner, Failure, select_checks
from kvref_conformance.runner.options import Effort
from kvref_conformance.testlib.registry import all_checks


def test_every_clause_has_a_bug_that_is_planted_or_in_the_zoo():
    with_a_bug = {param.values[1] for param in BUGS} | {member.clause for member in kvref_zoo.members()}
    assert set(all_clauses()) - with_a_bug == {"KERN-06"}  # its check needs gigabytes of memory


def on_reference(clause):
    """The reference, with the declared choice without which the clause is not offered."""
    return OnBackend(ReferenceBackend(), token_hits=clause == "PREFIX-19")


def failing(judge, checks):
    """Return the names of the failing checks, in order; failures are not shrunk."""
    return (check.name for check in checks if isinstance(judge.judge_check(check), Failure))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a bug can divide by zero
@pytest.mark.parametrize(("plant", "clause", "family"), BUGS)
def test_the_clause_notices(plant, clause, family, monkeypatch):
    plant(monkeypatch)
    ((_, checks),) = select_checks(clause).items()
    judge = CheckRunner(on_reference(clause), Effort(timeout=2))  # one bug hangs
    assert next(failing(judge, [check for check in checks if check.run and family in ("", check.family)]), None)


class UntilFound(Search):
    """A search that ends with the first failure of one clause."""

    clause = ""

    def add_failure(self, violation, call_trace):
        super().add_failure(violation, call_trace)
        self.calls_left = 0 if self.clause in self.findings else self.calls_left  # no calls for shrinking


def run_until_found(family, clause, seeds):
    """Run the state machine of a family on the reference, 60 call sequences for each seed, until the clause fails."""
    search, effort = UntilFound(on_reference(clause)), Effort(examples=60)
    search.clause = clause
    for seed in range(seeds):
        search.calls_left = None  # as in a run of its own, also if an earlier one found other clauses
        run_machine(family, search, seed, effort.num_sequences, effort.max_steps)
        if clause in search.findings:
            break
    return search.findings


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("plant", "family", "clause"), half_long(HIDDEN))
def test_a_machine_finds_it_alone(plant, family, clause, monkeypatch):
    plant(monkeypatch)
    # Nearly all are found with the first seed. Which are not changes with every change of a rule, because the draws change.
    assert clause in run_until_found(family, clause, seeds=5)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("plant", "family", "clause"), DEFERRED)
def test_a_machine_finds_it_between_two_calls(plant, family, clause, monkeypatch):
    plant(monkeypatch)
    assert clause in run_until_found(family, clause, seeds=5)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("plant", "family"), half_long(REAL))
def test_real_sizes_show_it(plant, family, monkeypatch):
    plant(monkeypatch)
    checks = [check for check in all_checks() if check.family == family and check.clause == "LAW-18" and not check.slow]
    judge = CheckRunner(OnBackend(ReferenceBackend()), Effort(real=True))
    assert next(failing(judge, sorted(checks, key=lambda check: check.real)), None)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("plant", "family"), REAL)
def test_small_sizes_do_not_show_it(plant, family, monkeypatch):
    """Otherwise it would not test LAW-18."""
    plant(monkeypatch)
    checks = [check for check in all_checks() if check.family == family and check.clause != "LAW-18" and not check.slow]
    assert list(failing(CheckRunner(OnBackend(ReferenceBackend()), Effort(examples=5)), checks)) == []
