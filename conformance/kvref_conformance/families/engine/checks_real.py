"""LAW-18: engines of production sizes."""

from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.engine.told import Talk

AT_ONCE = 512  # prompt tokens per call, because each call has a time limit of seconds


@check("LAW-18", "engine")
def hundreds_of_tokens_are_read_by_many_heads(subject: Subject) -> None:
    _two_talk(subject, heads=8, context=512)


@check("LAW-18", "engine", real=True)
def thousands_of_tokens_are_read_by_many_heads(subject: Subject) -> None:
    _two_talk(subject, heads=32, context=4096)


def _two_talk(subject: Subject, heads: int, context: int) -> None:
    """Two sessions generate with periods of many blocks, just below and just above a block boundary."""
    for period in (context // 2 - 1, context // 4 + 1):
        talk = Talk(
            subject, num_kv_heads=8, num_query_heads=heads, head_dim=128, context=context, period=period,
            cache_tokens=2 * subject.size("context", context),
        )  # fmt: skip
        prompts = [talk.prompt(talk.canary.period + more) for more in (1, 20)]
        first, second = (talk.begin(*(prompt[at : at + AT_ONCE] for at in range(0, len(prompt), AT_ONCE))) for prompt in prompts)
        for _ in range(4):
            talk.goes_on(first, 4, f"with a period of {talk.canary.period} tokens")
        talk.together([second, first], 6, "in steps of two long sessions")
