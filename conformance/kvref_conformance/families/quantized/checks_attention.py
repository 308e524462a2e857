"""Checks of ATTN-10: attention over the values that the cache reads as."""

from kvref_conformance.checking.attending import even, exact, queries
from kvref_conformance.checking.expect import within
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, new, pair_of_tokens
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.quantized.stream import formats_of_tokens


@check("ATTN-10", "quantized")
def attention_over_codes_is_over_what_they_read_as(subject: Subject) -> None:
    for name in formats_of_tokens(subject):
        cache = new(subject, "quantized", format=name)
        at_least(cache, capacity=7)
        layers = cache.config["num_layers"]
        for _ in range(7):
            cache.append_step(*pair_of_tokens(subject, layers))
        query = queries(subject, 1)
        want, bound = exact(subject, query, *cache.read_tokens(layers - 1, list(range(7))), scale=even(subject))
        within(cache.attend(layers - 1, query, even(subject)), want, bound, f"attention over {name} tokens")
