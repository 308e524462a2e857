"""The gauntlet of wrong designs: every proof holds, and the judge notices every design but those that are listed."""

from collections.abc import Iterator

import pytest
from wrong_designs import DESIGNS, GETS_THROUGH, Design, observe

from kvref import backend
from kvref_conformance.clauses import all_clauses
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.runner.check_runner import CheckRunner, Failure
from kvref_conformance.runner.options import Effort
from kvref_conformance.testlib.registry import Check, all_checks

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a wrong design can overflow or divide by zero
EVERY = [pytest.param(each, id=name) for name, each in DESIGNS.items()]
# Noticed by hand-written checks, so that each takes about a second.
SAMPLE = (
    "a_batch_of_padding_is_not_compacted",
    "a_copied_block_has_no_zeros",
    "a_prompt_is_quantized_from_unrounded_numbers",
    "a_write_of_a_whole_block_is_in_place",
    "records_are_cached_by_length",
    "remove_cuts_longer_layers_to_the_shortest",
    "remove_moves_tokens_inside_cached_blocks",
    "the_query_is_scaled_in_place",
    "truncate_keeps_the_integer_type",
    "truncate_works_for_the_rollback_only",
)


@pytest.mark.parametrize("wrong", EVERY)
def test_its_proof_shows_the_difference(wrong: Design, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong.clause in all_clauses() and len(wrong.why) > 30
    right = observe(wrong.proof)
    assert observe(wrong.proof) == right  # the calls are deterministic
    wrong.plant(monkeypatch)
    assert observe(wrong.proof) != right


def checks_of(wrong: Design) -> Iterator[Check]:
    """The checks of the design's family at defaults: those of its clause first, the state machine last."""
    checks = [check for check in all_checks() if check.family == wrong.family and not check.option]
    return iter(sorted(checks, key=lambda check: (check.run is None, check.clause != wrong.clause, check.clause, check.name)))


def noticed_by(wrong: Design) -> str:
    """The first check that fails, "" if none does."""
    judge = CheckRunner(OnBackend(backend("numpy")), Effort(shrinks=False))
    failed = (check for check in checks_of(wrong) if isinstance(judge.judge_check(check), Failure))
    first = next(failed, None)
    return f"{first.clause}: {first.name}" if first else ""


def judge(wrong: Design, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong.plant(monkeypatch)
    assert bool(noticed_by(wrong)) != (wrong.name in GETS_THROUGH)


@pytest.mark.parametrize("name", SAMPLE)
def test_the_judge_notices_a_sample(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    judge(DESIGNS[name], monkeypatch)


@pytest.mark.extended
@pytest.mark.parametrize("wrong", EVERY)
def test_the_judge_notices_it_unless_it_is_listed(wrong: Design, monkeypatch: pytest.MonkeyPatch) -> None:
    judge(wrong, monkeypatch)


def test_the_list_names_designs() -> None:
    assert DESIGNS.keys() >= GETS_THROUGH.keys()
