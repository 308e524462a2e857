"""Bugs in the family `sparse`."""

import numpy as np

from bugs.plant import bug, in_source
from kvref.sparse import SparseCache

APPEND, READ_INDEX, SELECT, ATTEND, OFFLOAD, RESTORE, DISCARD, SCORES, COPY = (
    f"kvref.sparse.SparseCache.{name}"
    for name in ("append", "read_index", "select", "attend", "offload", "restore", "discard", "_scores", "_copy_blocks")
)
SEEN = "kvref.sparse._count_seen"


@bug("SPARSE-01")
def index_keys_are_appended_in_reverse(patch):
    in_source(patch, APPEND, "index_keys[:, None, :]", "index_keys[::-1, None, :]")


@bug("SPARSE-01")
def only_the_first_append_writes_index_keys(patch):
    in_source(
        patch, APPEND, "zip(self._stores, (", "zip(self._stores[: 2 if start else 3], (", "strict=True):", "strict=False):",
    )  # fmt: skip


@bug("SPARSE-01")
def index_keys_are_the_keys(patch):
    in_source(patch, READ_INDEX, "[2][:, 0, :]", "[0][:, 0, : self.config.index_dim]")


@bug("SPARSE-01")
def one_index_key_is_broadcast(patch):
    in_source(
        patch, APPEND, "(keys.shape[0], config.index_dim)", '("n", config.index_dim)',
        "index_keys[:, None, :]", "np.resize(index_keys, (keys.shape[0], 1, config.index_dim))",
    )  # fmt: skip


@bug("SPARSE-01")
def index_keys_are_checked_after_the_allocation(patch):
    append = SparseCache.append

    def late(self, sequence, keys, values, index_keys):
        if len(index_keys) != len(keys) == len(values):
            append(self, sequence, keys, values, np.zeros((len(keys), self.config.index_dim), np.float32))
        append(self, sequence, keys, values, index_keys)

    patch.setattr(SparseCache, "append", late)


@bug("SPARSE-02")
def scores_below_zero_count(patch):
    in_source(patch, SCORES, "xp.where(products > 0, products, xp.zeros_like(products))", "products")


@bug("SPARSE-02")
def heads_have_equal_weights(patch):
    in_source(patch, SCORES, "weights[:, None, :]", "xp.ones_like(weights)[:, None, :]")


@bug("SPARSE-02")
def weights_are_multiplied_before_the_maximum(patch):
    in_source(
        patch, SCORES, "weights[:, None, :]", "xp.ones_like(weights)[:, None, :]",
        "xp.matmul(index_queries,", "weights[..., None] * xp.matmul(index_queries,",
    )  # fmt: skip


@bug("SPARSE-02")
def negative_scores_are_zero(patch):
    in_source(patch, SELECT, "-scores[row, :seen]", "-np.maximum(scores[row, :seen], 0)")


@bug("SPARSE-02")
def one_token_less_is_chosen(patch):
    in_source(patch, SELECT, "[: self.config.top_k])", "[: max(1, self.config.top_k - 1)])")


@bug("SPARSE-02")
def positions_have_the_order_of_their_scores(patch):
    in_source(patch, SELECT, "np.sort(np.argsort(", "np.asarray(np.argsort(")


@bug("SPARSE-02")
def unused_columns_are_zero(patch):
    in_source(patch, SELECT, "self.config.top_k), -1,", "self.config.top_k), 0,")


@bug("SPARSE-02")
def scores_are_rounded_to_eight_bits(patch):
    in_source(patch, SELECT, "-scores[row, :seen]", "-np.round(scores[row, :seen] / 8)")


@bug("SPARSE-02")
def scores_are_rounded_to_float16(patch):
    in_source(patch, SELECT, "-scores[row, :seen]", "-scores[row, :seen].astype(np.float16)")


@bug("SPARSE-03")
def later_tokens_are_hidden_after_the_selection(patch):
    in_source(
        patch, SELECT, "-scores[row, :seen]", "-scores[row]",
        "[: self.config.top_k])", "[: self.config.top_k])\n        best = best[best < seen]",
    )  # fmt: skip


@bug("SPARSE-03")
def causal_queries_see_one_token_more(patch):
    in_source(patch, SEEN, "max(0, length - num_queries + 1 + row)", "min(length, max(0, length - num_queries + 2 + row))")


@bug("SPARSE-03")
def causal_queries_are_those_of_the_first_tokens(patch):
    in_source(patch, SEEN, "max(0, length - num_queries + 1 + row)", "min(length, row + 1)")


@bug("SPARSE-04")
def attention_reads_all_tokens(patch):
    in_source(patch, ATTEND, "np.zeros((query", "np.ones((query")


@bug("SPARSE-04")
def minus_one_is_the_last_token(patch):
    in_source(patch, ATTEND, "chosen[chosen >= 0]", "chosen")


@bug("SPARSE-04")
def queries_attend_to_the_choice_of_the_first(patch):
    in_source(patch, ATTEND, "mask[row, chosen[chosen >= 0]] = True", "mask[:, chosen[chosen >= 0]] = row == 0")


@bug("SPARSE-04")
def attention_is_never_causal(patch):
    in_source(patch, ATTEND, "weights, causal)", "weights)")


@bug("SPARSE-04")
def uneven_queries_are_cut(patch):
    in_source(
        patch, ATTEND, "self._accept_index(index_queries, weights, query.shape[0])", "count = query.shape[0]",
        "self.select(sequence, index_queries, weights, causal))",
        "self.select(sequence, index_queries[:count], weights[:count], causal))",
    )  # fmt: skip


@bug("SPARSE-05")
def copies_of_blocks_have_no_index_keys(patch):
    in_source(patch, COPY, "in self._stores:", "in self._stores[:2]:")


@bug("SPARSE-05")
def only_index_keys_are_copied(patch):
    in_source(patch, COPY, "in self._stores:", "in self._stores[2:]:")


@bug("SPARSE-06")
def scores_include_the_rest_of_the_last_block(patch):
    scores = SparseCache._scores

    def of_blocks(self, sequence, index_queries, weights):
        found = scores(self, sequence, index_queries, weights)
        table, size = self._table(sequence), self.config.block_size
        end = found.shape[1]
        if end % size == 0:
            return found
        self._tables.lengths[table] = -(-end // size) * size
        whole = scores(self, sequence, index_queries, weights)
        self._tables.lengths[table] = end
        stale = whole[:, end:].max(axis=1)
        found[stale > found.max(axis=1), 0] = np.inf  # the chosen slot is clamped to the first token
        return found

    patch.setattr(SparseCache, "_scores", of_blocks)


@bug("SPARSE-06", "LAW-05", family="sparse")
def scores_of_the_rest_of_the_last_block_are_multiplied_by_zero(patch):
    scores = SparseCache._scores

    def of_blocks(self, sequence, index_queries, weights):
        table, length, size = self._table(sequence), self.length(sequence), self.config.block_size
        rest = self._tables.slots(table, 0, np.arange(length, -(-length // size) * size))
        return scores(self, sequence, index_queries, weights) + 0 * self._stores[2].read(rest).sum()

    patch.setattr(SparseCache, "_scores", of_blocks)


@bug("SPARSE-06")
def the_smallest_unused_id_is_returned(patch):
    in_source(patch, "kvref.sparse.SparseCache.create", "sequence = self._next_sequence",
              "sequence = self._next_sequence = min(set(range(len(self._table_of) + 1)) - set(self._table_of))")  # fmt: skip


@bug("SPARSE-06")
def truncate_keeps_a_token(patch):
    truncate = SparseCache.truncate
    patch.setattr(
        SparseCache, "truncate", lambda self, sequence, length: truncate(self, sequence, min(length + 1, self.length(sequence)))
    )


@bug("SPARSE-07")
def restored_index_keys_are_zero(patch):
    in_source(patch, RESTORE, "index_keys[:, 0, :]", "0 * index_keys[:, 0, :]")


@bug("SPARSE-07")
def restored_values_are_keys(patch):
    in_source(patch, RESTORE, "append(sequence, keys, values,", "append(sequence, keys, keys,")


@bug("SPARSE-07")
def the_last_token_is_not_offloaded(patch):
    in_source(patch, OFFLOAD, "part).copy()", "part)[: max(0, part.shape[0] - 1)].copy()")


@bug("SPARSE-07")
def a_copy_can_be_restored_once(patch):
    in_source(patch, RESTORE, "self._offloaded[self._known(handle)]", "self._offloaded.pop(self._known(handle))")


@bug("SPARSE-07")
def discard_keeps_the_copy(patch):
    in_source(patch, DISCARD, "del self._offloaded[self._known(handle)]", "self._known(handle)")


@bug("SPARSE-07")
def offload_drops_the_sequence(patch):
    offload = SparseCache.offload

    def dropping(self, sequence):
        handle = offload(self, sequence)
        self.drop(sequence)
        return handle

    patch.setattr(SparseCache, "offload", dropping)


@bug("SPARSE-08")
def append_reserves_a_block_for_the_next_token(patch):
    in_source(
        patch,
        APPEND,
        "self._missing_entries(table, start + keys.shape[0])",
        "self._missing_entries(table, start + keys.shape[0] + 1)",
    )


@bug("SPARSE-08")
def restore_without_room_keeps_its_sequence(patch):
    in_source(patch, RESTORE, "self.drop(sequence)", "self.append(sequence, keys[:1], values[:1], index_keys[:1, 0, :])")


@bug("SPARSE-02")
def the_fifth_index_head_is_ignored(patch):
    select = SparseCache.select

    def of_four_heads(self, sequence, queries, weights, *causal):
        return select(self, sequence, queries[:, :4], weights[:, :4], *causal)

    patch.setattr(SparseCache, "select", of_four_heads)


@bug("SPARSE-04")
def nan_in_a_later_token_reaches_every_query(patch):
    in_source(patch, ATTEND, "self._backend.asarray(mask))", "self._backend.asarray(mask)) + (0 * values.sum() if causal else 0)")


@bug("SPARSE-07")
def the_handle_of_a_discarded_copy_is_used_again(patch):
    discard = SparseCache.discard

    def reusing(self, handle):
        discard(self, handle)
        self._next_handle = handle

    patch.setattr(SparseCache, "discard", reusing)


@bug("SPARSE-07")
def a_handle_is_one_more_than_the_largest_of_a_copy(patch):
    in_source(patch, OFFLOAD, "self._next_handle, self._next_handle + 1", "max(self._offloaded, default=-1) + 1, 0")


@bug("SPARSE-03")
def hidden_tokens_have_a_large_negative_score(patch):
    in_source(
        patch, SELECT, "np.argsort(-scores[row, :seen]",
        "np.argsort(-np.where(np.arange(scores.shape[1]) < seen, scores[row], -1e9)",
        "best = np.sort(", "best = (lambda found: np.sort(found[found < seen]))(",
    )  # fmt: skip


@bug("LAW-18", family="sparse")
def a_selection_sorts_the_best_128_only(patch):
    in_source(patch, SELECT, 'kind="stable")[: self.config.top_k]', 'kind="stable")[: min(128, self.config.top_k)]')
