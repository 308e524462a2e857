"""TIER-13 and FMT-AFF-03: values that no tier can store, and separate scales for keys and values."""

import numpy as np

from kvref_conformance.checking.expect import equal, may_raise, raises, reads
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, formats_of, held, new, pair_of_tokens
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.tiered.checks import agree, append, both, tail_of, two_stores
from kvref_conformance.families.tiered.stream import TieredStream
from kvref_conformance.families.tiered.tiers import can_go
from kvref_conformance.oracle.formats import AFFINE


@check("TIER-13a", "tiered")
def a_value_the_tail_cannot_hold_is_refused_at_append(subject: Subject) -> None:
    cache, tiers = both(subject, tail_dtype="float16")
    at_least(cache, tail_length=1)
    append(subject, cache, tiers, 6)
    for bad in (65520.0, -1e30, np.nan, np.inf):
        for which in (0, 1):
            rows = pair_of_tokens(subject, subject.size("tokens", 2))
            rows[which][-1, -1, -1] = bad
            with raises("NonFinite"):
                cache.append(*rows)
            agree(subject, cache, tiers, f"after a token with {bad} raised NonFinite")
    edge = np.full((1, subject.heads, subject.dim), 65504.0, np.float32)
    cache.append(edge, edge)
    tiers.append(edge, edge)
    agree(subject, cache, tiers, "after append of the largest float16 number")


@check("TIER-13b", "tiered")
def a_token_no_store_can_hold_is_refused_at_append(subject: Subject) -> None:
    wide = np.zeros((1, subject.heads, subject.dim), np.float32)
    wide[0, 0, 0], wide[0, -1, -1] = 3e38, -3e38  # each is finite, their difference is not
    for tail in (4, 0):
        cache, tiers = both(subject, tail_dtype=tail_of(subject, "float32", "bfloat16"), tail_length=tail)
        at_least(cache, max_tokens=7)
        append(subject, cache, tiers, 6)
        with raises("NonFinite"):
            cache.append(wide, wide)
        agree(subject, cache, tiers, "after a token whose range overflows float32 raised NonFinite")
        large = np.full_like(wide, 8e37)
        large[0, 0, 0] *= -1
        if can_go(large, [tiers.policy["store_format"]]) is not True:
            continue  # scales of 16 bits, which TIER-18 judges
        cache.append(large, large / 2)
        equal(
            cache.total_tokens,
            len(tiers.tokens) + 1,
            "total_tokens after append of a large token whose range does not overflow float32",
        )


@check("TIER-13b", "tiered")
def a_token_is_looked_at_as_the_tail_holds_it(subject: Subject) -> None:
    """A bfloat16 tail rounds up: the range of the given token is finite, but the range of the rounded token is not."""
    wide = np.full((1, subject.heads, subject.dim), 2.0**127 * (1 - 2.0**-10), np.float32)
    wide[0, 0, 0] *= -1
    cache, tiers = both(subject, tail_dtype="bfloat16", tail_length=1)
    append(subject, cache, tiers, 3)
    with raises("NonFinite"):
        cache.append(wide, wide)
    append(subject, cache, tiers, 3)
    agree(subject, cache, tiers, "after a token whose range overflows after rounding to the tail's dtype raised NonFinite")


@check("TIER-13c", "tiered")
def what_was_taken_can_move_on(subject: Subject) -> None:
    """Tokens migrate through a warm tier, whose dequantized values may be larger than the appended values."""
    for magnitude in np.array([2.0**125, 2.0**126, 2.0**127 * (1 - 2.0**-24), 3.4028235e38], np.float32):
        for warm in formats_of(subject, "warm_format", "q8", "int8"):
            sizes = {"tail_dtype": tail_of(subject, "float32", "bfloat16"), "tail_length": 1, "warm_length": 1}
            cache = new(subject, "tiered", **sizes, warm_format=warm, store_format=two_stores(subject)[0])
            at_least(cache, max_tokens=5)
            token = np.full((1, subject.heads, subject.dim), magnitude, np.float32)
            for sign in (1, -1):
                token[0, -1, 0] = sign * magnitude
                with may_raise("NonFinite"):
                    cache.append(token, token)
            before = cache.total_tokens
            cache.append(*pair_of_tokens(subject, 3))
            equal(
                cache.total_tokens,
                before + 3,
                f"total_tokens after an append of 3 tokens to a cache with tokens of magnitude {magnitude}",
            )


@check("FMT-AFF-03", "tiered")
def keys_and_values_have_scales_of_their_own(subject: Subject) -> None:
    for name in formats_of(subject, "store_format", *AFFINE):
        stream = TieredStream(subject, tail_length=0, store_format=name)
        keys, values = pair_of_tokens(subject, 4 + stream.config["tail_length"])
        keys, values = held(subject, keys / 100), held(subject, values * 100)
        stream.append(keys, values)
        reads(subject, stream.read(), stream.expected(keys, values), f"{name} tokens with small keys and large values")
