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
    "a_call_copies_at_most_sixteen_blocks": "no call of a check copies more than sixteen blocks",
    "a_damaged_file_evicts_blocks": "no check compares `match` before and after a damaged file is loaded into a full pool",
    "a_failed_load_is_a_use": "no check evicts after a prepare_load that raised",
    "a_fork_shares_the_list_of_committed_keys": "no check commits different blocks in a parent and its child",
    "a_new_policy_is_tried_on_the_tail_only": "no check changes the store's format while a warm token does not fit it",
    "a_prompt_that_fills_the_reset_buffer_is_adopted": "no check changes an array that filled the buffer exactly after a reset",
    "a_widened_read_is_cached_by_length": "no check writes a raw token at a length that was read before, in a 16-bit dtype",
    "an_overwrite_forgets_the_tokens_of_the_parent": "no check commits other tokens in the parent after an overwrite in a fork",
    "append_writes_into_cached_blocks": "no check appends, by append or append_step, after a truncation inside a cached block",
    "attend_after_truncate_uses_the_next_chunk": "no check attends after a truncation to the beginning of a chunk",
    "commit_pairs_the_remaining_blocks_with_the_first_keys": "no check commits after release_before and reads what is found then",
    "copies_to_the_device_wait_for_a_read": "no check replaces a block in its place between its copy to the device and a read",
    "gather_batch_restarts_after_1024_tokens": "no check gathers a batch with a sequence of more than 1,024 tokens",
    "gather_batch_returns_one_buffer_of_offsets": "LAW-17 is judged on keys and values, and not on offsets",
    "ids_have_32_bits": "no check adds 2^32 to the id of a live sequence",
    "keys_that_are_stored_already_are_used_in_order": "no check evicts after a prepare_store of stored and new keys together",
    "load_assumes_a_full_ring": "no check saves after a truncated draft and then reads every position of the loaded cache",
    "load_keeps_the_committed_tokens": "no check loads over a sequence with committed tokens and commits the loaded ones",
    "remove_reuses_the_first_rotation": "no check removes two ranges of different lengths with one theta",
    "reorder_is_in_place_for_ascending_rows": "no check reorders a batch of three to [0, 0, 1]",
    "save_returns_one_staging_buffer": "no check saves another sequence of the same size before it loads the first file",
    "the_ring_forgets_what_a_draft_overwrote": "no check reads all positions after a draft and a shorter append",
    "truncate_forgets_that_the_policy_moved_tokens": "no check truncates after a policy change that moved tokens",
    "truncate_releases_the_first_blocks_first": "no check evicts some of the blocks that one truncate released",
}
