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
    "a_hidden_token_has_the_score_minus_10000": "no check has scores below -10,000 before a hidden token",
    "a_logit_sink_is_not_part_of_the_largest_score": "no check has a logit sink far above all scores",
    "a_nan_with_low_bits_becomes_infinite_in_bfloat16": "no check encodes a NaN whose payload is in the lower 16 bits",
    "a_partial_last_block_can_be_a_target": "no check copies to the block at the end of a store that no whole block fits into",
    "a_tile_begins_at_its_group": "no check attends over more than 512 tokens of a KIVI cache",
    "a_tile_of_query_heads_is_at_most_eight": "no check has more than eight query heads per kv head and several kv heads",
    "cancelled_tokens_stay_in_the_cache": "no check extends a session, after cancel, by more tokens than were cancelled",
    "dequantize_ignores_strides": "LAW-15 is judged on the rows of quantize, and not on the codes of dequantize",
    "offsets_have_the_type_of_the_slots": "no check names a slot in int8 whose offset exceeds 127",
    "the_largest_score_is_found_before_scaling": "no check has a negative scale with large scores",
    "the_mean_error_is_a_mean_of_chunk_means": "no check has more rows than a chunk, the last of another magnitude",
    "whole_blocks_are_removed_from_the_table": "no check removes whole blocks from a session",
}
