"""Checks of ATTN-10: attention over the values that the cache reads as."""

from kvref_conformance.checking.attending import even, exact, queries
from kvref_conformance.checking.expect import within
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import pair_of_tokens
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.paged.counting import with_room


@check("ATTN-10", "paged")
def attention_over_pages_is_over_what_they_read_as(subject: Subject) -> None:
    count, few = subject.size("sequences", 2), subject.size("block_size", 3) + 1
    cache = with_room(subject, 4 * count)
    sequences = [cache.create() for _ in range(count)]
    for at in (0, few):
        for sequence in sequences:
            cache.write(sequence, 0, at, *pair_of_tokens(subject, few))
    query = queries(subject, 2)
    want, bound = exact(subject, query, *cache.gather(sequence, 0), scale=even(subject))
    within(cache.attend(sequence, 0, query, even(subject)), want, bound, "attention over a sequence")
