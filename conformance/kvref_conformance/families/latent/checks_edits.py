"""Checks of EDIT for the latent cache: `truncate`."""

from kvref_conformance.checking.expect import raises, same
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, held, made
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.latent.checks import dtypes, filled, given, holds, joined

LOUD = 2.0**8


@check("EDIT-01ac", "latent")
def the_first_tokens_stay(subject: Subject) -> None:
    for sizes in dtypes(subject):
        cache, (latent, rope) = filled(subject, 7, **sizes)
        for length in (6, 3, 0):
            cache.truncate(length)
            holds(
                subject, cache, (latent[:length], rope[:length]), f"of a {cache.config['dtype']} cache after truncate({length})"
            )


@check("EDIT-02ab", "latent")
def no_more_tokens_stay_than_there_are(subject: Subject) -> None:
    cache, pair = filled(subject, 5)
    most = cache.config["max_tokens"]
    for length in subject.integers(6, max(6, most), most + 1, -1, -5, -6):
        with raises("PositionOutOfRange"):
            cache.truncate(length)
        holds(subject, cache, pair, f"after truncate({length}) of 5 tokens raised PositionOutOfRange")
    cache.truncate(5)
    holds(subject, cache, pair, "after truncate(5) of 5 tokens")


@check("EDIT-03", "latent")
def what_follows_is_as_if_nothing_had_gone(subject: Subject) -> None:
    for sizes in dtypes(subject):
        cache, pair = filled(subject, 4, **sizes)
        at_least(cache, max_tokens=8)
        for draft, length, more in ((2, 4, 1), (1, 2, 3), (3, 0, 2), (2, 3, 1)):  # the last keeps one of the draft
            latent, rope = given(subject, cache, draft)
            drafted = held(subject, latent * LOUD), held(subject, rope * LOUD)
            cache.append(*drafted)
            pair = joined(pair, drafted)
            cache.truncate(length)
            pair = joined((pair[0][:length], pair[1][:length]), given(subject, cache, more))
            cache.append(pair[0][length:], pair[1][length:])
            never = made(subject, "latent", **cache.config)
            never.append(*pair)
            when = f"of a {cache.config['dtype']} cache after a draft of {draft}, truncate({length}) and an append of {more}"
            same(cache.read(), never.read(), f"rows {when}, compared with a cache without that draft")
            holds(subject, cache, pair, when)
