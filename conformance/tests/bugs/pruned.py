"""Bugs in the family `pruned`."""

import numpy as np

from bugs.plant import bug, hidden, in_source
from kvref.errors import CapacityExceeded
from kvref.pruned import PrunedCache

APPEND, PRUNE, TRUNCATE, ATTEND, KEEP = (
    f"kvref.pruned.PrunedCache.{name}" for name in ("append", "prune", "truncate", "attend", "_keep")
)


@bug("PRUNED-01")
def stored_tokens_have_the_order_of_their_scores(patch):
    in_source(patch, PRUNE, "np.sort(best, axis=1).T", "best.T")


@bug("PRUNED-01")
def append_puts_tokens_first(patch):
    in_source(patch, APPEND, "[self._keys, keys]", "[keys, self._keys]")


@bug("PRUNED-01")
def positions_count_rows(patch):
    patch.setattr(PrunedCache, "positions", lambda self, head: list(range(self.stored_tokens)))


@bug("PRUNED-01")
def a_negative_head_counts_from_the_end(patch):
    positions = PrunedCache.positions
    patch.setattr(PrunedCache, "positions", lambda self, head: positions(self, head % self.config.num_kv_heads))


@bug("PRUNED-02")
def sinks_are_evicted(patch):
    in_source(patch, PRUNE, "by_rank[:, :sinks] = np.inf", "pass")


@bug("PRUNED-02")
def one_recent_token_is_missing(patch):
    in_source(patch, PRUNE, "self.stored_tokens - recent :", "self.stored_tokens - max(0, recent - 1) :")


@bug("PRUNED-02")
def without_recent_tokens_all_are_recent(patch):
    in_source(patch, PRUNE, "by_rank[:, self.stored_tokens - recent :]", "by_rank[:, -recent:]")


@hidden("pruned", "PRUNED-02")
@bug("PRUNED-02")
def recent_tokens_are_those_at_the_last_positions(patch):
    """A token at one of the last positions can have been evicted."""
    in_source(
        patch, PRUNE,
        "by_rank[:, self.stored_tokens - recent :]", "by_rank[self._positions.T >= self.length - recent]",
    )  # fmt: skip


@bug("PRUNED-02")
def sinks_are_the_tokens_at_the_first_positions(patch):
    in_source(patch, PRUNE, "by_rank[:, :sinks]", "by_rank[self._positions.T < sinks]")


@hidden("pruned", "PRUNED-02")
@bug("PRUNED-02")
def sinks_and_recent_tokens_have_the_score_1e4(patch):
    in_source(patch, PRUNE, "= np.inf", "= 1e4")


@bug("PRUNED-02")
def sinks_and_recent_tokens_have_the_score_1e9(patch):
    in_source(patch, PRUNE, "= np.inf", "= 1e9")


@bug("PRUNED-02")
def the_smallest_scores_stay(patch):
    in_source(patch, PRUNE, "np.argsort(-by_rank", "np.argsort(np.where(by_rank == np.inf, -np.inf, by_rank)")


@bug("PRUNED-02")
def of_equal_scores_the_later_token_stays(patch):
    in_source(
        patch,
        PRUNE,
        'np.argsort(-by_rank, axis=1, kind="stable")[:, :keep]',
        'np.argsort(by_rank, axis=1, kind="stable")[:, -keep:]',
    )


@bug("PRUNED-02")
def the_sort_is_not_stable(patch):
    in_source(patch, PRUNE, ', kind="stable"', "")


@bug("PRUNED-02")
def negative_scores_count_by_their_size(patch):
    in_source(patch, PRUNE, "by_rank = given.copy()", "by_rank = np.abs(given)")


@bug("PRUNED-02")
def few_tokens_are_pruned_too(patch):
    in_source(
        patch,
        PRUNE,
        "if self.stored_tokens <= keep:",
        "keep = min(keep, max(1, self.stored_tokens - 1))\n    if self.stored_tokens <= keep:",
    )


@bug("PRUNED-03")
def all_heads_keep_the_tokens_of_the_first(patch):
    in_source(patch, PRUNE, "by_rank = given.copy()", "by_rank = np.repeat(given[:1], len(given), axis=0)")


@bug("PRUNED-03")
def the_mean_of_all_heads_decides(patch):
    in_source(
        patch, PRUNE, "by_rank = given.copy()", "by_rank = np.repeat(given.mean(axis=0, keepdims=True), len(given), axis=0)"
    )


@bug("PRUNED-03")
def values_are_gathered_by_the_rows_of_the_first_head(patch):
    of_the_first = "(flat if name == '_keys' else (0 * rows + rows[:, :1] * heads + np.arange(heads)).reshape(-1))"
    in_source(patch, KEEP, "gather(of_head, flat)", f"gather(of_head, {of_the_first})")


@bug("PRUNED-03")
def positions_are_those_of_the_first_head(patch):
    in_source(patch, KEEP, "self._positions, rows, axis=0)", "self._positions, 0 * rows + rows[:, :1], axis=0)")


@bug("PRUNED-04")
def the_next_position_is_the_number_of_stored_tokens(patch):
    in_source(patch, PRUNE, "self._keep(np.sort(best, axis=1).T)", "self._keep(np.sort(best, axis=1).T)\n    self.length = keep")


@bug("PRUNED-04")
def positions_are_numbered_anew(patch):
    in_source(
        patch, APPEND, "np.arange(self.length, self.length + new)", "np.arange(self.stored_tokens, self.stored_tokens + new)"
    )


@bug("PRUNED-05")
def query_heads_read_the_next_kv_head(patch):
    in_source(patch, ATTEND, "partial(self._read_head, head)", "partial(self._read_head, (head + 1) % heads)")


@bug("PRUNED-05")
def a_causal_mask_counts_rows(patch):
    in_source(patch, ATTEND, "self._positions[:, head]\n", "np.arange(self.length - self.stored_tokens, self.length)\n")


@bug("PRUNED-05")
def causal_masks_are_those_of_the_first_head(patch):
    in_source(patch, ATTEND, "self._positions[:, head]\n", "self._positions[:, 0]\n")


@bug("PRUNED-05")
def queries_begin_at_the_number_of_stored_tokens(patch):
    in_source(
        patch, ATTEND, "np.arange(self.length - count, self.length)", "np.arange(self.stored_tokens - count, self.stored_tokens)"
    )


@bug("PRUNED-05")
def a_query_without_tokens_sees_the_first(patch):
    own = "np.arange(self.length - count, self.length)"
    in_source(patch, ATTEND, f"{own} if", f"np.maximum({own}, self._positions[:1].max(initial=0)) if")


@bug("PRUNED-06")
def evicted_tokens_take_room(patch):
    in_source(patch, APPEND, "if self.stored_tokens + new >", "if self.length + new >")


@bug("PRUNED-06")
def one_token_too_many_is_accepted(patch):
    in_source(patch, APPEND, "if self.stored_tokens + new >", "if self.stored_tokens + new - 1 >")


@bug("PRUNED-07")
def scores_of_evicted_tokens_are_accepted(patch):
    in_source(
        patch,
        PRUNE,
        'accept("scores", scores, (self.config.num_kv_heads, self.stored_tokens), self._backend)',
        'accept("scores", scores, (self.config.num_kv_heads, "n"), self._backend)[:, -self.stored_tokens :]',
    )


@bug("PRUNED-07")
def not_a_number_is_the_smallest_score(patch):
    in_source(patch, PRUNE, "if not np.isfinite(given).all():", "given = np.nan_to_num(given, nan=-np.inf)\n    if False:")


@bug("PRUNED-07")
def no_token_may_stay(patch):
    in_source(patch, PRUNE, "max(1, sinks + recent)", "sinks + recent")


@bug("PRUNED-07")
def sinks_and_recent_tokens_may_be_more_than_all(patch):
    in_source(patch, PRUNE, "if keep < max(1, sinks + recent):", "if keep < 1:")


@bug("PRUNED-08")
def rows_are_truncated_whatever_their_positions(patch):
    def truncate(self, length):
        first = max(0, self.stored_tokens - (self.length - length))
        self._keep(np.repeat(np.arange(first)[:, None], self.config.num_kv_heads, axis=1))
        self.length = length

    patch.setattr(PrunedCache, "truncate", truncate)


@bug("PRUNED-08")
def the_first_head_decides_about_truncate(patch):
    in_source(patch, TRUNCATE, "range(self.config.num_kv_heads):", "range(1):")


@bug("PRUNED-08")
def truncate_leaves_the_length(patch):
    in_source(patch, TRUNCATE, "self.length = length", "self.length = max(length, self.length - 1)")


@bug("PRUNED-08")
def truncate_accepts_a_later_length(patch):
    in_source(patch, TRUNCATE, "self.length + 1, PositionOutOfRange", "self.length + 2, PositionOutOfRange")


@bug("PRUNED-09")
def clear_keeps_the_length(patch):
    clear = PrunedCache.clear

    def keeping(self):
        length = getattr(self, "length", 0)
        clear(self)
        self.length = length

    patch.setattr(PrunedCache, "clear", keeping)


@hidden("pruned", "PRUNED-02")
def a_third_prune_keeps_other_tokens(patch):
    prune = PrunedCache.prune

    def counting(self, scores, keep, sinks=0, recent=0):
        before = self.stored_tokens
        self.evictions = getattr(self, "evictions", 0) if self.length else 0
        prune(self, -scores if self.evictions == 2 else scores, keep, sinks, recent)
        self.evictions += self.stored_tokens < before

    patch.setattr(PrunedCache, "prune", counting)


@hidden("pruned", "PRUNED-08")
def truncate_to_an_evicted_position_removes_one_token_more(patch):
    truncate = PrunedCache.truncate

    def more(self, length):
        evicted = length in range(self.length) and length - 1 >= 0 and length - 1 not in self._positions[:, 0]
        truncate(self, length)
        if evicted and self.stored_tokens:
            self._keep(np.repeat(np.arange(self.stored_tokens - 1)[:, None], self.config.num_kv_heads, axis=1))

    patch.setattr(PrunedCache, "truncate", more)


@bug("PRUNED-02")
def scores_are_compared_in_half_precision(patch):
    in_source(patch, PRUNE, "by_rank = given.copy()", "by_rank = given.clip(-6e4, 6e4).astype(np.float16).astype(np.float32)")


@bug("PRUNED-05")
def without_a_scale_it_is_1_over_head_dim(patch):
    attend = PrunedCache.attend

    def scaled(self, *given, **named):
        if len(given) <= 1 and named.get("scale") is None:
            named["scale"] = 1 / self.config.head_dim
        return attend(self, *given, **named)

    patch.setattr(PrunedCache, "attend", scaled)


@bug("PRUNED-05")
def nan_in_a_later_token_reaches_every_query(patch):
    attend = PrunedCache.attend

    def masked_by_zero_weights(self, query, scale=None, causal=False):
        out = attend(self, query, scale, causal)
        return out + 0 * self._values.sum() if causal else out

    patch.setattr(PrunedCache, "attend", masked_by_zero_weights)


@bug("PRUNED-06")
def positions_are_bytes(patch):
    positions = PrunedCache.positions
    patch.setattr(PrunedCache, "positions", lambda self, head: [each % 256 for each in positions(self, head)])


@bug("PRUNED-06")
def the_length_is_limited_too(patch):
    append = PrunedCache.append

    def limited(self, keys, values):
        if self.length + keys.shape[0] > 4 * self.config.max_tokens + 16:
            raise CapacityExceeded("too many tokens since the last clear")
        append(self, keys, values)

    patch.setattr(PrunedCache, "append", limited)
