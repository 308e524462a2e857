"""ATTN-10: attention uses the dequantized rows that `read` returns."""

import numpy as np

from kvref_conformance.checking.attending import even, exact, queries
from kvref_conformance.checking.expect import shaped, within
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new, pair_of_tokens
from kvref_conformance.conversation.subject import Subject


@check("ATTN-10", "tiered")
def attention_over_tiers_is_over_what_they_read_as(subject: Subject) -> None:
    cache = new(subject, "tiered", warm_length=2)
    query = queries(subject, 1)
    empty = cache.attend(query, even(subject))
    within(empty, np.zeros(query.shape), 0.0, "attention over an empty cache")  # 0 and -0 are equal
    cache.append(*pair_of_tokens(subject, 13))
    want, bound = exact(subject, query, *cache.read(), scale=even(subject))
    got = shaped(
        cache.attend(query, even(subject)),
        query.shape,
        "attention over tail, warm tier and store, compared with attention over the values that read returns",
    )
    within(
        got, want, bound, "attention over tail, warm tier and store, compared with attention over the values that read returns"
    )
