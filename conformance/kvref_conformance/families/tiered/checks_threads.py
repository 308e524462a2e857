"""TIER-12: concurrent calls to a tiered cache."""

import numpy as np

from kvref_conformance.checking.expect import equal, same
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new
from kvref_conformance.checking.threads import THREADS, in_threads
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.tiered.checks import tail_of
from kvref_conformance.outcome import NotOffered


@check("TIER-12a", "tiered")
def appends_from_threads_lose_and_tear_nothing(subject: Subject) -> None:
    together = subject.size("tokens", 2)  # tokens per append
    appends = min(25, subject.size("tail_length", 25 * THREADS * together) // (THREADS * together))
    each = appends * together
    total = THREADS * each
    cache = new(subject, "tiered", max_tokens=max(1, total), tail_length=total, tail_dtype=tail_of(subject))
    if not 0 < total <= cache.config["tail_length"]:
        raise NotOffered(f"a tail of {together} tokens for each of {THREADS} threads, within its limits")
    shape = (1, subject.heads, subject.dim)

    def work(thread: int, rng: np.random.Generator) -> None:
        for first in range(thread * each, (thread + 1) * each, together):
            rows = np.concatenate([np.full(shape, mark, np.float32) for mark in range(first, first + together)])
            cache.append(rows, -rows)

    in_threads(subject, work)
    keys, values = cache.read()
    equal(len(keys), total, f"number of tokens after {THREADS} threads appended {each} tokens each")
    same(values, -keys, "values of each token, compared with its negated keys")
    marks = keys[:, 0, 0].astype(int).tolist()
    equal(sorted(marks), list(range(total)), "the tokens that threads appended, in ascending order")
    for thread in range(THREADS):
        own = [mark for mark in marks if mark // each == thread]
        equal(own, sorted(own), f"order of the tokens of thread {thread}")
    for at in range(0, total, together):
        equal(marks[at : at + together], list(range(marks[at], marks[at] + together)), f"tokens of one append, at position {at}")


@check("TIER-12b", "tiered")
def readers_beside_writers_see_whole_tokens(subject: Subject) -> None:
    cache = new(subject, "tiered", max_tokens=200, tail_length=200, tail_dtype=tail_of(subject))
    longest, shape = min(3, subject.size("tokens", 3)), (subject.heads, subject.dim)
    appended = list[int]()

    def work(thread: int, rng: np.random.Generator) -> None:
        for i in range(15):
            rows = np.full((int(rng.integers(1, longest + 1)), *shape), 60 * thread + i + 1, np.float32)
            cache.append(rows, -rows)
            appended.append(len(rows))
            keys, values = cache.read()
            same(values, -keys, "values read while other threads append, compared with the negated keys")
            stats = cache.stats()
            parts = stats.tail_tokens + stats.warm_tokens + stats.store_tokens
            equal(
                parts,
                stats.total_tokens,
                "sum of the tiers' tokens in stats while other threads append, compared with total_tokens",
            )

    in_threads(subject, work)
    equal(cache.total_tokens, min(sum(appended), cache.config["max_tokens"]), "total_tokens after all threads ended")
