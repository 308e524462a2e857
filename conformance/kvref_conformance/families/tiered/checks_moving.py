"""MOVE: `load` restores every token in its tier and format."""

from contextlib import suppress

from kvref_conformance.checking.expect import equal, pair, raises
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import made, pair_of_tokens, takes
from kvref_conformance.conversation.exchange import error_of
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.tiered.checks import append, both
from kvref_conformance.outcome import Broken, NotOffered


def is_as(loaded: Handle, cache: Handle, when: str) -> None:
    total = cache.total_tokens
    equal(loaded.total_tokens, total, f"total_tokens of a loaded cache {when}, compared with the saved cache")
    with suppress(NotOffered):
        equal(dict(loaded.stats()), dict(cache.stats()), f"stats of a loaded cache {when}, compared with the saved cache")
    pair(loaded.read(), cache.read(), f"tokens of a loaded cache {when}, compared with the saved cache")


def tiers_of(cache: Handle, first: int, stop: int) -> list[str]:
    return [cache.tier_of(position) for position in range(first, stop)]


def truncated(cache: Handle, length: int) -> str:
    """Returns "truncated", or the kind of the error that `truncate` raises."""
    try:
        cache.truncate(length)
    except (NotOffered, Broken):
        raise
    except Exception as error:
        return error_of(error).kind
    return "truncated"


def moved(subject: Subject, cache: Handle, count: int, when: str) -> None:
    """Check that a loaded copy of a cache with `count` appended tokens equals it, also after later appends and truncations."""
    loaded = made(subject, "tiered", **cache.config)
    loaded.load(cache.save())
    is_as(loaded, cache, when)
    for more in (1, 4):
        first = count - cache.total_tokens
        equal(
            tiers_of(loaded, first, count),
            tiers_of(cache, first, count),
            f"tiers of positions [{first}, {count}) of a loaded cache {when}",
        )
        if first:
            with raises("PositionOutOfRange"):
                loaded.tier_of(first - 1)
        keys, values = pair_of_tokens(subject, more)
        for each in (cache, loaded):
            each.append(keys, values)
        count += more
        is_as(loaded, cache, f"{when}, after load and an append of {more} tokens")
        loaded = made(subject, "tiered", **cache.config)
        loaded.load(cache.save())
    for length in (count - 2, count):  # removes tokens whose append migrated others, then none
        with suppress(NotOffered):
            equal(
                truncated(loaded, length),
                truncated(cache, length),
                f"the result of truncate({length}) on a loaded cache {when}, compared with the saved cache",
            )
    is_as(loaded, cache, f"{when}, after load and truncate")


@check("MOVE-01ac", "tiered")
def tiers_and_positions_are_those_that_were_saved(subject: Subject) -> None:
    for warm in dict.fromkeys(subject.size("warm_length", wanted) for wanted in (0, 3)):
        cache, tiers = both(subject, warm_length=warm)
        append(subject, cache, tiers, 7)
        moved(subject, cache, tiers.appended, f"with warm_length {warm}")
        cache, tiers = both(subject, warm_length=warm)
        append(subject, cache, tiers, cache.config["max_tokens"] + 3)
        moved(subject, cache, tiers.appended, f"with warm_length {warm}, after the first tokens were evicted")


@check("MOVE-01bc", "tiered")
def tokens_stay_in_the_format_that_they_came_in(subject: Subject) -> None:
    cache, tiers = both(subject, warm_length=0)
    others = [name for name in ("q8", "q4", "int8") if takes(subject, "store_format", name)]
    others = [name for name in others if name != cache.config["store_format"]]
    if not others:
        raise NotOffered("a second store format")
    append(subject, cache, tiers, cache.config["tail_length"] + 3)
    for name in (others[0], cache.config["store_format"]):  # another format, then the original one again
        cache.update_policy(store_format=name)
        tiers.update_policy(store_format=name)
        append(subject, cache, tiers, 2)
    moved(subject, cache, tiers.appended, "after two changes of its store format")
