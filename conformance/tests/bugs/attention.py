"""Bugs in attention."""

import numpy as np

import kvref
from bugs.plant import bug, in_source
from kvref.backend import ReferenceBackend
from kvref.paged import PagedCache


@bug("ATTN-01", "ATTN-04")
def query_heads_are_dealt_out_in_turn(patch):
    attend = ReferenceBackend.attend

    def dealt(self, query, keys, values, scale, mask, logit_sink=None):
        order = np.arange(query.shape[1]).reshape(-1, keys.shape[1]).T.reshape(-1)
        out = np.empty_like(query)
        out[:, order] = attend(self, query[:, order], keys, values, scale, mask, logit_sink)
        return out

    patch.setattr(ReferenceBackend, "attend", dealt)


ATTENTION = "kvref_conformance.implementations.backends.attention"  # as the judge accesses it


@bug("ATTN-01")
def values_must_be_as_wide_as_keys(patch):
    in_source(patch, ATTENTION, '(num_tokens, num_kv_heads, "value_dim")', "tuple(keys.shape)")


@bug("LAW-10")
def keys_of_nothing_are_taken(patch):
    in_source(patch, ATTENTION, "if head_dim == 0:", "if False:")


@bug("LAW-10")
def values_of_nothing_are_taken(patch):
    in_source(patch, ATTENTION, "if values.shape[2] == 0:", "if False:")


@bug("ATTN-03")
def the_largest_score_is_not_subtracted(patch):
    in_source(patch, "kvref.backend.ReferenceBackend.attend", "scores - xp.max(scores, axis=0, keepdims=True)", "scores")


@bug("ATTN-03")
def scores_of_minus_infinity_are_no_tokens(patch):
    largest = "xp.max(scores, axis=0, keepdims=True)"
    total = "xp.sum(weights, axis=0, keepdims=True)"
    finite = f"xp.where(xp.isinf({largest}), np.float32(0), {largest})"
    divisor = f"xp.where({total} == 0, np.float32(1), {total})"
    in_source(patch, "kvref.backend.ReferenceBackend.attend", largest, finite, total, divisor)


@bug("ATTN-02", "ATTN-05")
def weights_do_not_sum_to_one(patch):
    in_source(
        patch,
        "kvref.backend.ReferenceBackend.attend",
        "xp.sum(weights, axis=0, keepdims=True)",
        "(1 + xp.sum(weights, axis=0, keepdims=True))",
    )


@bug("ATTN-06")
def later_tokens_weigh_more(patch):
    in_source(
        patch,
        "kvref.backend.ReferenceBackend.attend",
        "axis=-1) * scale",
        "axis=-1) * scale + 0.01 * np.arange(k.shape[0], dtype=np.float32)[:, None]",
    )


@bug("ATTN-07")
def masked_tokens_weigh_zero_times_nan(patch):
    def masked(self, query, keys, values, scale, mask, logit_sink=None):
        group = query.shape[1] // keys.shape[1]
        k, v = (np.repeat(part, group, axis=1) for part in (keys, values))
        scores = np.where(mask[:, :, None], np.einsum("qhd,nhd->qnh", query, k) * np.float32(scale), -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True, initial=-np.inf))
        return np.einsum("qnh,nhd->qhd", weights / weights.sum(axis=1, keepdims=True), v).astype(np.float32)

    patch.setattr(ReferenceBackend, "attend", masked)


@bug("ATTN-08")
def no_tokens_give_nan(patch):
    in_source(patch, "kvref.backend.ReferenceBackend.attend", "continue", "out[i, ...] = np.nan; continue")


@bug("ATTN-09", "ATTN-07")
def the_causal_mask_is_off_by_one(patch):
    in_source(
        patch, ATTENTION,
        "_standing(query.shape[0], length, causal)", "_standing(query.shape[0], length, causal) + causal",
        "np.arange(length), _scale", "np.arange(num_tokens), _scale", "max(1, length))", "max(1, num_tokens))",
    )  # fmt: skip


@bug("ATTN-10")
def attention_over_pages_reads_whole_blocks(patch):
    def whole_blocks(self, sequence, layer, query, scale=None, causal=False):
        table = self._table(sequence)
        keys, values = self._store.read(self._tables.slots(table, layer, np.arange(self._tables.capacity(table))))
        return kvref.attention(query, keys, values, scale=scale, causal=causal)

    patch.setattr(PagedCache, "attend", whole_blocks)
