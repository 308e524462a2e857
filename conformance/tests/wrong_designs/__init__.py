"""A gauntlet of wrong designs, written from the specification without knowledge of the judge's checks and of its planted bugs.

Each design is a patch of kvref on the NumPy backend that breaks one clause in a way in which an engineer could, with a proof that
it is wrong. GETS_THROUGH names the designs that `kvref check` does not notice at its defaults.
"""

from wrong_designs import dense_designs, format_designs, moving_designs, other_designs, paged_designs, prefix_designs
from wrong_designs.design import DESIGNS, Design, observe

__all__ = ["DESIGNS", "GETS_THROUGH", "Design", "observe"]

_MODULES = (dense_designs, format_designs, moving_designs, other_designs, paged_designs, prefix_designs)  # register designs

# By name of the design: why no check at defaults notices it.
GETS_THROUGH: dict[str, str] = {
    "a_cache_of_one_block_is_read_without_a_copy": "LAW-17 is not judged on a pooled cache with one block",
    "a_failed_load_is_a_use": "no check evicts after a prepare_load that raised",
    "a_hidden_token_has_the_score_minus_10000": "no check has scores below -10,000 before a hidden token",
    "a_logit_sink_is_not_part_of_the_largest_score": "no check has a logit sink far above all scores",
    "a_nan_with_low_bits_becomes_infinite_in_bfloat16": "no check encodes a NaN whose payload is in the lower 16 bits",
    "a_new_policy_is_tried_on_the_tail_only": "no check changes the store's format while a warm token does not fit it",
    "a_partial_last_block_can_be_a_target": "no check copies to the block at the end of a store that no whole block fits into",
    "a_prompt_that_fills_the_reset_buffer_is_adopted": "no check changes an array that filled the buffer exactly after a reset",
    "a_tile_begins_at_its_group": "no check attends over more than 512 tokens of a KIVI cache",
    "a_tile_of_query_heads_is_at_most_eight": "no check has more than eight query heads per kv head and several kv heads",
    "a_widened_read_is_cached_by_length": "no check writes a raw token at a length that was read before, in a 16-bit dtype",
    "attend_after_truncate_uses_the_next_chunk": "no check attends after a truncation to the beginning of a chunk",
    "cancelled_tokens_stay_in_the_cache": "no check extends a session, after cancel, by more tokens than were cancelled",
    "copies_to_the_device_wait_for_a_read": "no check replaces a block in its place between its copy to the device and a read",
    "dequantize_ignores_strides": "LAW-15 is judged on the rows of quantize, and not on the codes of dequantize",
    "keys_that_are_stored_already_are_used_in_order": "no check evicts after a prepare_store of stored and new keys together",
    "load_assumes_a_full_ring": "no check saves after a truncated draft and then reads every position of the loaded cache",
    "offsets_have_the_type_of_the_slots": "no check names a slot in int8 whose offset exceeds 127",
    "reorder_is_in_place_for_ascending_rows": "no check reorders a batch of three to [0, 0, 1]",
    "the_largest_score_is_found_before_scaling": "no check has a negative scale with large scores",
    "the_mean_error_is_a_mean_of_chunk_means": "no check has more rows than a chunk, the last of another magnitude",
    "the_ring_forgets_what_a_draft_overwrote": "no check reads all positions after a draft and a shorter append",
    "truncate_forgets_that_the_policy_moved_tokens": "no check truncates after a policy change that moved tokens",
    "whole_blocks_are_removed_from_the_table": "no check removes whole blocks from a session",
}
