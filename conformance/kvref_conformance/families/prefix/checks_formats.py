"""Checks of PREFIX-16: hits in formats with scales."""

from kvref_conformance.checking.expect import equal, pair
from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.paged.checks_formats import PLACES, of_each_kind, of_format
from kvref_conformance.families.prefix.served import Served, exactly, prompt


@check("PREFIX-16a", "prefix")
def a_hit_reads_the_bits_that_were_committed(subject: Subject) -> None:
    subject.need(sequences=2)
    for name in of_each_kind(subject, PLACES):
        served = Served(subject, **of_format(name))
        tokens, hit = prompt(2 * served.size + 1), 2 * served.size
        first = served.serve(tokens)
        before = [part[:hit] for part in served.cache.gather(first, 0)]
        if not subject.limits.switch(subject.family, "other_eviction_order"):  # then it is found after drop
            served.cache.drop(first)
            served.seen(prompt(served.size + 1, 2))
        again, found = served.begin([*tokens, 1])
        equal(found, hit, f"length of a sequence that begins with a hit in {name}")
        pair(served.cache.gather(again, 0), (before[0], before[1]), f"the hit in {name}, compared with the committed tokens")
        served.look(again, hit, f"the hit in {name}")


@check("PREFIX-16b", "prefix")
def what_was_evicted_comes_back_with_scales_of_its_own(subject: Subject) -> None:
    for name in of_each_kind(subject, PLACES):
        served = exactly(subject, 3, **of_format(name))
        one, other = prompt(2 * served.size + 1), prompt(3 * served.size, 2)
        for tokens in (one, other, one):  # each needs almost every block
            sequence = served.serve(tokens)
            served.look(sequence, len(tokens), f"tokens written to reused blocks, in {name}")
            served.cache.drop(sequence)
