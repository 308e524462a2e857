"""Checks of ATTN-10: attention over the values that the cache reads as."""

from kvref_conformance.checking.attending import exact, normal
from kvref_conformance.checking.expect import within
from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.channels.known import Run, some


@check("ATTN-10", "channels")
def attention_is_over_quantized_tokens_and_those_in_full(subject: Subject) -> None:
    for name in some(subject):
        run = Run(subject, name)
        run.append(run.residual + 5)
        heads, dim = run.row
        query, scale = normal(subject, 2, heads * subject.size("group_size", 2), dim), 2.0**-6 / dim
        want, bound = exact(subject, query, *run.cache.read(list(range(len(run)))), scale=scale)
        within(run.cache.attend(query, scale), want, bound, f"attention over {len(run)} {name} tokens")
