"""Checks of PREFIX-03: tokens whose 64-bit hashes collide."""

from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.prefix.served import Served
from kvref_conformance.outcome import NotOffered

PAGE = 256  # tokens per block: the default of transformers
# A first block of 224 ones, either five of these tokens, and 27 ones. Both blocks have the 64-bit BLAKE2b hash 0x2ee99e83f5615a8a
# (over int32). The search for them took eight minutes on one core.
ALIKE = [7232, 6294, 7679, 2095, 839], [7821, 5009, 4025, 7586, 128]


@check("PREFIX-03b", "prefix")
def tokens_of_one_short_hash_are_not_alike(subject: Subject) -> None:
    served = Served(subject, 4, block_size=PAGE)
    if served.size != PAGE:
        raise NotOffered(f"blocks of {PAGE} tokens, where its limits say {subject.limits.of(subject.family, 'block_size')}")
    one, other = ([*[1] * 224, *five, *[1] * 27] for five in ALIKE)
    served.there(one)
    served.finds([*other, 1], 0, "256 tokens whose 64-bit hash is that of other committed tokens")
    served.finds([*one, 1], PAGE, "the 256 tokens that were committed")
