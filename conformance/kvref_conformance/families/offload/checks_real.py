"""LAW-18: host stores of thousands of blocks."""

from kvref_conformance.checking.expect import equal
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.offload.checks import in_order

PROMPT = 90  # number of keys per prompt


@check("LAW-18", "offload")
def a_host_store_of_thousands_is_filled_twice(subject: Subject) -> None:
    in_order(subject)
    store = new(subject, "offload", capacity=3000)
    total, first = store.config["capacity"], 2**52
    prompts = [list(range(start, start + PROMPT)) for start in range(first, first + 2 * total, PROMPT)]
    for keys in prompts:
        if len(keys) <= total:
            store.complete_store(list(store.prepare_store(keys)[0]))
    whole = [keys for keys in prompts if store.lookup(keys) == len(keys)]
    kept = whole[-(total // PROMPT) :]
    equal(len(kept), min(total // PROMPT, len(prompts)), "number of recent prompts of which lookup finds every key")
    held = sorted(place for keys in kept for place in store.places(keys))
    equal(len(set(held)), len(held), "number of distinct places of the keys that lookup finds")
    if total >= PROMPT:
        equal(
            store.lookup(prompts[0]),
            0 if total < PROMPT * len(prompts) else PROMPT,
            "number of keys that lookup finds of the first prompt",
        )
