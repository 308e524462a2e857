"""Checks of KIVI-08 and EDIT-01 to 03: `truncate`, which may raise NotTruncatable where tokens are quantized."""

from kvref_conformance.checking.expect import equal, may_raise, raises
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import held
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.channels.known import LOUD, Run, one, some


def goes_back(run: Run, length: int) -> bool:
    """Truncates. Returns False if the cache raises NotTruncatable."""
    with may_raise("NotTruncatable"):
        run.truncate(length)
        return True
    return False


def refilled(run: Run, length: int, count: int) -> None:
    """Appends `count` louder tokens. Raises Broken unless the cache reads as one that never had the truncated tokens."""
    keys, values = run.tokens(count)
    run.give(held(run.subject, keys * LOUD), values)
    run.as_if_new(f"after truncate({length}) and an append of {count}")


@check("EDIT-01abc", "channels")
def the_first_tokens_stay(subject: Subject) -> None:
    run = Run(subject, one(subject))
    run.append(run.residual - 1)
    for length in (run.residual - 2, 3, 0):
        before = run.cache.read(list(range(length)))
        run.truncate(length)
        run.is_still(before, f"after truncate({length})")
        for position in (length, run.residual - 2):
            with raises("PositionOutOfRange"):
                run.cache.read([position])


@check("EDIT-02ab", "channels")
def no_more_tokens_stay_than_there_are(subject: Subject) -> None:
    run = Run(subject, one(subject))
    run.append(run.residual + 2)
    before = run.read()
    for length in subject.integers(len(run) + 1, run.config["max_tokens"] + 1, -1, -len(run)):
        with raises("PositionOutOfRange"):
            run.cache.truncate(length)
        run.is_still(before, f"after truncate({length}) raised PositionOutOfRange")
    run.truncate(len(run))
    run.is_still(before, "after truncate to the current length")


@check("KIVI-08ab", "channels")
def all_goes_while_the_residual_was_never_full(subject: Subject) -> None:
    for name in some(subject):
        run = Run(subject, name)
        run.append(run.residual - 1)
        run.truncate(run.residual - 4)
        refilled(run, run.residual - 4, 3)
        run.truncate(2)
        refilled(run, 2, 2 * run.residual)
        run.truncate(0)
        refilled(run, 0, run.residual + 1)


@check("KIVI-08ab", "channels")
def a_draft_goes_back(subject: Subject) -> None:
    """Truncates drafts of up to `rollback` tokens at every phase of the residual."""
    subject.need(rollback=1)
    for rollback in (3, 1):
        run = Run(subject, one(subject), rollback=rollback)
        draft, residual = min(run.config["rollback"], run.residual), run.residual
        for target in (residual - 1, residual, residual + 1, residual + draft, 2 * residual, 2 * residual + 1):
            run.append(target - len(run) + draft)
            run.truncate(target)
            run.as_if_new(f"after a draft of {draft} tokens was truncated")
        refilled(run, len(run), residual)


@check("KIVI-08abc", "channels")
def what_cannot_go_back_says_so(subject: Subject) -> None:
    for name in some(subject):
        run = Run(subject, name)
        run.append(2 * run.residual + 3)
        for length in (2 * run.residual + 1, 2 * run.residual, run.residual + 1, run.residual, 1):
            before = run.read()
            if length < len(run) and goes_back(run, length):
                refilled(run, length, 2)
            else:
                run.is_still(before, f"after truncate({length}) raised NotTruncatable")
        run.truncate(0)
        refilled(run, 0, run.residual + 1)


@check("EDIT-03", "channels")
def what_follows_is_as_if_nothing_had_gone(subject: Subject) -> None:
    for name in some(subject):
        run = Run(subject, name)
        run.append(run.residual - 2)
        for length, count in ((run.residual - 4, 1), (5, 1)):
            run.truncate(length)
            refilled(run, length, count)
        refilled(run, 5, run.residual)
        run.cache.clear()
        equal(run.cache.length, 0, "length after clear")
        run.truncate(0)
        run.keys, run.values = run.keys[:0], run.values[:0]
        refilled(run, 0, run.residual + 2)
