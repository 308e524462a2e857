"""The diagnosis next to a failure of an engine: which cache entries it read instead, found by generating more tokens."""

import pytest
from bugs import engines
from commandline import kvref

from kvref.backend import ReferenceBackend
from kvref_conformance.implementations import load_implementation
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.runner.check_runner import CheckRunner, select_checks
from kvref_conformance.runner.options import Effort, RunOptions
from kvref_conformance.runner.subprocess_runner import make_runner

__all__ = ["kvref"]


def causes(judge, clause):
    ((_, checks),) = select_checks(clause).items()
    return [outcome.cause for outcome in judge.judge_clause([check for check in checks if check.run]) if outcome.calls]


PLANTED = [
    (
        "ENG-03", engines.later_pieces_are_turned_one_position_too_far,
        "keys of positions 7 to 20 of session 0 were rotated one position too far, in every layer, after a later chunk",
    ),
    (
        "ENG-05", engines.a_step_lands_in_a_block_that_was_given_away,
        "session 3 read positions 13 to 15 of session 1 instead of its own positions 13 to 15, in layer 1 at least",
    ),
    (
        "ENG-13", engines.a_window_is_one_too_wide,
        "session 0 attended to a window of 17 or more tokens instead of 16, in every layer",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("clause", "plant", "cause"), PLANTED)
def test_it_stands_beside_the_failure(clause, plant, cause, monkeypatch):
    plant(monkeypatch)
    assert causes(CheckRunner(OnBackend(ReferenceBackend()), Effort(timeout=10)), clause) == [cause]


def test_what_was_taken_back_and_stayed_is_named():
    (cause,) = causes(CheckRunner(load_implementation("zoo:engine-rolls-back-the-length-only")), "ENG-09")
    assert cause.startswith("session 0 wrote its tokens after stale ones: position 38 of session 0 before a truncation")


def test_a_child_tells_it_too():
    judge = make_runner(RunOptions("zoo:engine-rolls-back-the-length-only", Effort(timeout=10), isolate=True))
    try:
        assert causes(judge, "ENG-09")[0].startswith("session 0 wrote its tokens after stale ones: position 38 ")
    finally:
        judge.close()


def test_a_replay_that_parts_as_recorded_says_it_again(kvref):
    done = kvref("check", "zoo:engine-rolls-back-the-length-only", "--clause", "ENG-09", "--examples", "10")
    said = next(line for line in done.stdout.splitlines() if line.startswith("    cause    "))
    (trace,) = (line.split()[3] for line in done.stdout.splitlines() if line.startswith("  replay   "))
    assert said in kvref("replay", trace).stdout.splitlines()
    assert "cause" not in kvref("replay", trace, "numpy").stdout


def test_what_is_no_wrong_token_has_none(monkeypatch):
    engines.it_speaks_up_to_the_end_and_then_fails(monkeypatch)
    assert causes(CheckRunner(OnBackend(ReferenceBackend()), Effort(timeout=10)), "ENG-11") == [""]


def test_other_families_have_none():
    assert causes(CheckRunner(load_implementation("zoo:blocks-freed-twice")), "BLOCK-05") == [""]
