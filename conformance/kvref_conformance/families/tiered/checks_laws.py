"""LAW-05, LAW-12, LAW-20: laws in the form that applies to this family only."""

from collections.abc import Iterator

from kvref_conformance.checking.expect import equal, raises
from kvref_conformance.checking.integers import Seen, Typed, the_same_in_any_type
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import fitted, new, pair_of_tokens, refused
from kvref_conformance.conversation.subject import Subject


@check("LAW-12a", "tiered")
def tiers_must_fit_the_cache(subject: Subject) -> None:
    most = fitted(subject, "tiered")["max_tokens"]
    refused(subject, "tiered", tail_length=most + 1)
    refused(subject, "tiered", tail_length=most // 2 + 1, warm_length=most - most // 2)


@check("LAW-20", "tiered")
def tiers_are_as_long_in_any_type(subject: Subject) -> None:
    keys, values = pair_of_tokens(subject, 150)

    def script(typed: Typed) -> Iterator[Seen]:
        cache = typed.new("tiered", max_tokens=120, tail_length=100, migration_batch=64)
        for part in (slice(0, 75), slice(75, 150)):
            yield "append of 75 tokens", typed.call(cache, "append", keys[part], values[part])
        yield "statistics of 150 tokens", dict(cache.stats())
        yield "tiers of positions 29, 49, 50 and 120", [typed.call(cache, "tier_of", position) for position in (29, 49, 50, 120)]
        yield "the last 120 of 150 tokens", typed.call(cache, "read")

    the_same_in_any_type(subject, script)


@check("LAW-05ab", "tiered")
def a_token_forgotten_is_nowhere(subject: Subject) -> None:
    cache = new(subject, "tiered", max_tokens=6)
    cache.append(*pair_of_tokens(subject, cache.config["max_tokens"] + 3))
    for position in (0, 2):
        with raises("PositionOutOfRange"):
            cache.tier_of(position)
    cache.clear()
    equal(
        (cache.total_tokens, len(cache.read()[0])), (0, 0), "total_tokens and the number of tokens that read returned after clear"
    )
    with raises("PositionOutOfRange"):
        cache.tier_of(0)
    cache.append(*pair_of_tokens(subject, 1))
    newest = next(tier for tier in ("tail", "warm", "store") if cache.config.get(f"{tier}_length", 1))
    equal(cache.tier_of(0), newest, "tier of the first token after clear")


@check("LAW-20", "tiered")
def tokens_go_in_any_type(subject: Subject) -> None:
    keys, values = pair_of_tokens(subject, 110)

    def script(typed: Typed) -> Iterator[Seen]:
        cache = typed.new("tiered", max_tokens=400, tail_length=200, migration_batch=64)
        cache.append(keys, values)
        for time in range(3):
            yield f"truncate(100), call {time + 1}", typed.call(cache, "truncate", 100)
            cache.append(keys[:60], values[:60])
            yield f"total_tokens after an append of 60, call {time + 1}", cache.total_tokens
        yield "tier of position 159", typed.call(cache, "tier_of", 159)
        yield "160 tokens", typed.call(cache, "read")

    the_same_in_any_type(subject, script)
