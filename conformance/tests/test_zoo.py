"""Every member of the zoo fails the clause that it names, and only the other clauses that it also breaks."""

import re

import pytest

import kvref_zoo
from kvref_conformance.clauses import all_clauses
from kvref_conformance.runner.zoo_report import clauses_broken_by

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a bug can divide by zero


@pytest.mark.parametrize("name", kvref_zoo.names())
def test_it_is_caught_by_the_clause_it_names(name):
    member = kvref_zoo.member(name)
    assert clauses_broken_by(name, member.clause, examples=10) == {member.clause}


@pytest.mark.long
@pytest.mark.parametrize("name", kvref_zoo.names())
def test_it_is_caught_by_no_other_than_it_names(name):
    member = kvref_zoo.member(name)
    assert clauses_broken_by(name, examples=10) <= {member.clause, *member.also}


def test_there_are_forty_of_them_and_most_were_real():
    members = list(kvref_zoo.members())
    assert len(members) >= 40
    assert sum(bool(member.seen_in) for member in members) >= 35


@pytest.mark.parametrize("name", kvref_zoo.names())
def test_its_card_is_in_order(name):
    member = kvref_zoo.member(name)
    assert {member.clause, *member.also} <= set(all_clauses())
    assert member.name == f"zoo:{name}"
    assert re.fullmatch(r"([\w.-]+/[\w.-]+#\d+)?", member.seen_in)
    assert len(member.story) > 30
