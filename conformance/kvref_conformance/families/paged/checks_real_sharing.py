"""Checks of LAW-18: a long prompt with hundreds of forks."""

from kvref_conformance.checking.expect import equal
from kvref_conformance.checking.real import affordable
from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.paged.counting import with_room
from kvref_conformance.families.paged.known import Known


@check("LAW-18", "paged")
def hundreds_go_on_from_one_prompt(subject: Subject) -> None:
    count = subject.size("sequences", 300)
    subject.need(sequences=2)
    cache = Known(subject, with_room(subject, 400, block_size=16, num_layers=1))
    parent = cache.create(affordable(subject, 65 * cache.size + 5, 2))
    family = [parent, *(cache.fork(parent) for _ in range(min(count, 300) - 1))]
    for sequence in family[::50]:
        cache.write(sequence, 0, cache.length(sequence, 0), 2)
    cache.write(family[-1], 0, cache.size - 1, 2)
    cache.look("after hundreds of forks and writes to some of them")
    cache.adds_up("after hundreds of forks")
    for sequence in family[::2]:
        cache.drop(sequence)
    cache.look("after drop of every second fork")
    for sequence in family[1::2]:
        cache.drop(sequence)
    equal(cache.used(), 0, "allocated blocks after drop of all sequences")
