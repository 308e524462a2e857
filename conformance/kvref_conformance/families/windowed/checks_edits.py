"""Checks of WIN-06 and EDIT-02: `truncate`, which may raise NotTruncatable where needed tokens were evicted."""

from kvref_conformance.checking.attending import even, queries
from kvref_conformance.checking.expect import equal, may_raise, raises, shaped
from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.windowed.checks import Run


def goes_back(run: Run, length: int) -> bool:
    """Truncates. Returns False if the cache raises NotTruncatable."""
    with may_raise("NotTruncatable"):
        run.truncate(length)
        return True
    return False


@check("WIN-06ac", "windowed")
def tokens_go_before_any_left_the_window(subject: Subject) -> None:
    for sinks in (0, 2):
        run = Run(subject, window=9, sinks=sinks)
        most = run.config["window"] - 1
        run.step(subject.size("tokens", most), "in a step that leaves room for one token in the window")
        while len(run) < most:
            run.step(1, "in a step that leaves room for one token in the window")
        for length in (most - 1, most - 3, 1, 0):
            run.truncate(length)
            run.holds(f"after truncate({length}), before the window was full")
        run.step(subject.size("tokens", 4), "in a step of tokens that replace truncated ones")


@check("WIN-06bc", "windowed")
def a_draft_goes_back(subject: Subject) -> None:
    """Truncates drafts of up to `rollback` tokens at every phase of the ring."""
    subject.need(rollback=1)
    for rollback in (3, 1):
        for drafted in range(1, subject.size("rollback", rollback) + 1):
            run = Run(subject, rollback=rollback)
            drafted = subject.size("tokens", drafted)
            run.step(subject.size("tokens", run.config["window"] - 2), "in a step before the first draft")
            for time in range(2 * (run.config["window"] + run.config["rollback"]) if run.config["window"] < 32 else 5):
                length, when = len(run), f"in a step that replaces draft {time + 1} of {drafted} tokens"
                run.step(drafted, f"in the step of draft {time + 1} of {drafted} tokens")
                run.truncate(length)
                run.holds(f"after draft {time + 1} of {drafted} tokens was truncated")
                run.step(1, when)


@check("WIN-06cd", "windowed")
def what_is_gone_does_not_come_back_as_something_else(subject: Subject) -> None:
    for rollback in (0, 3):
        for sinks in (0, 2):
            for wanted in (-1, -2, -5, -8, -12, sinks, sinks + 1):  # negative: from the end; others: long before the window
                run = Run(subject, rollback=rollback, sinks=sinks)
                run.append(subject.size("tokens", run.config["window"] + 6))
                run.append(subject.size("tokens", 5))
                length = wanted if wanted >= 0 else max(0, len(run) + wanted)
                if length > len(run):
                    continue
                when = f"truncate({length}) of {len(run)} with a window of {run.config['window']}"
                if goes_back(run, length):
                    run.holds(f"after {when}")
                    run.step(subject.size("tokens", 2), f"after {when}")
                else:
                    run.holds(f"after {when} raised NotTruncatable")
                    run.step(1, f"after {when} raised NotTruncatable")


@check("WIN-06e", "windowed")
def attending_where_others_went_is_right_or_refused(subject: Subject) -> None:
    for rollback, back in ((0, 1), (3, 2), (3, 4)):  # back = rollback + 1: a token that the newest token sees is evicted
        run = Run(subject, rollback=rollback)
        run.append(subject.size("tokens", run.config["window"] + 6))
        run.append(subject.size("tokens", 5))
        if len(run) > back and goes_back(run, len(run) - back):
            query = queries(subject, 2)
            with may_raise("PositionOutOfRange"):
                got = shaped(
                    run.cache.attend(query, even(subject)), query.shape, f"attention after truncate removed {back} tokens"
                )
                run.saw(got, query, [len(run) - 1] * 2, f"after truncate removed {back} tokens")


@check("WIN-06bc", "windowed")
def tokens_that_went_leave_no_place_behind(subject: Subject) -> None:
    """Appends and truncates drafts of one token while the ring is full. The stored tokens are as if there had been no drafts."""
    subject.need(rollback=1)
    never, run = Run(subject, rollback=1), Run(subject, rollback=1)
    for time in range(3 * run.config["window"] if run.config["window"] < 32 else 8):
        run.step(1, f"in a step of one token after {len(run)}, between drafts that are truncated")
        run.append(1)
        run.truncate(len(run) - 1)
        run.holds(f"after {time + 1} drafts of one token were truncated")
    never.cache.append(run.keys, run.values)
    never.keys, never.values = run.keys, run.values
    never.holds("in a cache without drafts")


@check("EDIT-02ab", "windowed")
def no_more_tokens_stay_than_came(subject: Subject) -> None:
    run = Run(subject)
    for count in (3, 9):
        run.append(subject.size("tokens", count))
        came = len(run)
        for length in subject.integers(came + 1, came + 20, -1, -came):
            with raises("PositionOutOfRange"):
                run.cache.truncate(length)
            run.holds(f"after truncate({length}) of {came} tokens raised PositionOutOfRange")
        run.cache.truncate(came)
        run.holds(f"after truncate({came}) of {came} tokens")
        equal(run.cache.length, came, f"length after truncate({came})")
