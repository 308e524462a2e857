"""The gauntlet of wrong designs: every proof holds, and the judge notices every design."""

from collections.abc import Iterator

import pytest
from wrong_designs import DESIGNS, Design, observe

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
# The clause by which a design is noticed, if it is not the design's own. Its checks run first, to save time.
NOTICED_BY = {
    "truncating_into_the_sinks_stores_them_twice": "MOVE-01",
    "an_append_of_the_whole_ring_starts_at_slot_0": "LAW-05",
    "a_delayed_reorder_is_lost_by_growth": "EDIT-08",
    "append_step_appends_layer_by_layer": "LAW-01",
    "the_largest_magnitude_is_of_256_numbers": "FMT-ROT-02",
    "append_step_uses_the_scale_of_keys_for_values": "LAW-04",
    "the_first_append_after_load_is_at_the_longest_layer": "LAW-01",
    "a_row_is_finite_if_its_sum_is": "FMT-AFF-01",
    "a_row_after_zeros_uses_the_last_scale": "FMT-GGML-03",
    "a_tile_begins_at_its_group": "LAW-18",
    "an_older_run_of_the_same_format_is_continued": "MOVE-01",
    "tokens_that_are_never_stored_have_no_position": "EDIT-06",
    "bytes_are_counted_in_the_newest_format": "MOVE-01",
    "a_prompt_longer_than_the_tail_skips_it": "EDIT-06",
    "a_failed_store_is_rolled_back_again_later": "MOVE-13",
    "a_step_without_room_has_served_the_first_sessions": "ENG-10",
    "a_tile_of_query_heads_is_at_most_eight": "LAW-18",
    "references_are_counted_in_a_byte": "LAW-18",
    "fork_forgets_what_was_released": "WIN-09",
    "a_call_copies_at_most_sixteen_blocks": "LAW-18",
    "match_of_several_blocks_is_a_use": "PREFIX-08",
    "commit_pairs_the_remaining_blocks_with_the_first_keys": "PREFIX-04",
    "load_keeps_the_committed_tokens": "PREFIX-02",
    "a_layer_is_found_in_its_block_by_remainder": "EDIT-01",
    "a_damaged_file_evicts_blocks": "LAW-01",
}


@pytest.mark.parametrize("wrong", EVERY)
def test_its_proof_shows_the_difference(wrong: Design, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong.clause in all_clauses() and len(wrong.why) > 30
    right = observe(wrong.proof)
    assert observe(wrong.proof) == right  # the calls are deterministic
    wrong.plant(monkeypatch)
    assert observe(wrong.proof) != right


def checks_of(wrong: Design) -> Iterator[Check]:
    """The checks of the design's family at defaults: those that are expected to notice it first, the state machine last."""
    checks = [check for check in all_checks() if check.family == wrong.family and not check.option]
    first = wrong.clause, NOTICED_BY.get(wrong.name)
    return iter(sorted(checks, key=lambda check: (check.clause not in first, check.run is None, check.clause, check.name)))


def noticed_by(wrong: Design) -> str:
    """The first check that fails, "" if none does."""
    judge = CheckRunner(OnBackend(backend("numpy")), Effort(shrinks=False))
    failed = (check for check in checks_of(wrong) if isinstance(judge.judge_check(check), Failure))
    first = next(failed, None)
    return f"{first.clause}: {first.name}" if first else ""


@pytest.mark.parametrize(
    "wrong", [pytest.param(each, id=name, marks=() if name in SAMPLE else pytest.mark.extended) for name, each in DESIGNS.items()]
)
def test_the_judge_notices_it(wrong: Design, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong.plant(monkeypatch)
    assert noticed_by(wrong)


def test_the_list_names_designs() -> None:
    assert DESIGNS.keys() >= NOTICED_BY.keys()
