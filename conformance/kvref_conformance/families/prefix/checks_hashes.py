"""PREFIX-03: a hash that somebody could collide."""

from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.prefix.served import Served
from kvref_conformance.outcome import NotOffered

PAGE = 256  # tokens: what transformers has where nobody says otherwise
# In one block of 224 ones, five of these and 27 ones, both make 0x2ee99e83f5615a8a by BLAKE2b of 64 bits over int32, and nothing
# before them. One core looked for eight minutes.
ALIKE = [7232, 6294, 7679, 2095, 839], [7821, 5009, 4025, 7586, 128]


@check("PREFIX-03b", "prefix")
def tokens_of_one_short_hash_are_not_alike(subject: Subject) -> None:
    served = Served(subject, 4, block_size=PAGE)
    if served.size != PAGE:
        raise NotOffered(f"blocks of {PAGE} tokens, where its limits say {subject.limits.of(subject.family, 'block_size')}")
    one, other = ([*[1] * 224, *five, *[1] * 27] for five in ALIKE)
    served.there(one)
    served.finds([*other, 1], 0, "256 tokens, where others whose hash of 64 bits is the same were committed")
    served.finds([*one, 1], PAGE, "the 256 tokens that were committed")
