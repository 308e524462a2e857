"""EDIT: `truncate` and `clear` have the same effect on every rank."""

from kvref_conformance.checking.expect import pair, raises
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import made
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.sharded.known import Known, grids

WANTED = ((2, 3), (4, 1), (1, 2))


@check("EDIT-01ac", "sharded")
def the_first_tokens_stay_on_every_rank(subject: Subject) -> None:
    for config in grids(subject, *WANTED):
        known = Known(subject, **config)
        turn = known.size * known.columns
        known.append(2 * turn + 1)
        for length in dict.fromkeys((len(known), 2 * turn, 2 * turn - 1, turn + 1, turn, known.size + 1, known.size, 1, 0)):
            if length <= len(known):
                known.truncate(length)
                known.look(f"after truncate to {length} tokens")


@check("EDIT-02ab", "sharded")
def no_more_tokens_stay_than_there_are(subject: Subject) -> None:
    for config in grids(subject, *WANTED):
        known = Known(subject, **config)
        known.append(5)
        for length in subject.integers(6, max(6, known.room), known.room + 1, -1, -5):
            with raises("PositionOutOfRange"):
                known.cache.truncate(length)
            known.look(f"after truncate({length}) of {len(known)} tokens raised PositionOutOfRange")
        known.truncate(len(known))
        known.look("after truncate to the current length")


@check("EDIT-03", "sharded")
def what_follows_is_as_if_nothing_had_gone(subject: Subject) -> None:
    for config in grids(subject, *WANTED):
        known = Known(subject, **config)
        turn = known.size * known.columns
        known.append(known.size + 1)
        for draft, back, more in ((turn, turn, 1), (3, 2, 2), (known.size, known.size + 1, turn), (1, 1, 1)):
            known.append(draft)
            known.truncate(max(0, len(known) - back))
            known.append(more)
            never = made(subject, "sharded", **config)
            never.append(known.keys, known.values)
            when = f"after an append of {draft}, a truncation by {back} and an append of {more}"
            pair(known.cache.read(), never.read(), f"tokens {when}, compared with a cache without that draft")
            known.look(when)
