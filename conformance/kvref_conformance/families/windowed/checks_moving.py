"""Checks of MOVE-01: a loaded windowed cache continues at the saved position, not at position 0."""

import numpy as np

from kvref_conformance.checking.attending import even, exact, queries
from kvref_conformance.checking.expect import equal, may_raise, pair, within
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new, pair_of_tokens
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.oracle.attention import seen


@check("MOVE-01ac", "windowed")
def positions_go_on_where_they_were(subject: Subject) -> None:
    for sinks in dict.fromkeys(subject.size("sinks", wanted) for wanted in (0, 2)):
        cache = new(subject, "windowed", sinks=sinks)
        sees = {name: cache.config[name] for name in ("window", "sinks", "chunk")}
        count = 2 * sees["window"] + sinks + cache.config["rollback"] + 1  # some tokens left the window, and the ring wrapped
        cache.append(*pair_of_tokens(subject, count))
        loaded = new(subject, "windowed", sinks=sinks)
        loaded.append(*pair_of_tokens(subject, 3))
        loaded.load(cache.save())
        for more in (0, 1, 3):
            keys, values = pair_of_tokens(subject, more)
            for each in (cache, loaded):
                each.append(keys, values)
            count += more
            when = f"of {count} tokens with {sinks} sinks, {more} of them appended after load"
            equal(loaded.length, count, f"length {when}")
            held = [int(at) for at in seen(count, **sees) if at < count]
            pair(loaded.read(held), cache.read(held), f"positions {held} {when}")
            if sinks < count - sees["window"] - cache.config["rollback"] - 3:
                with may_raise("PositionOutOfRange"):
                    got, want = loaded.read([sinks]), cache.read([sinks])
                    pair(got, want, f"position {sinks} {when}, which no query sees any more")


@check("MOVE-01c", "windowed")
def what_a_query_sees_is_what_it_would_have_seen(subject: Subject) -> None:
    cache, loaded = new(subject, "windowed"), new(subject, "windowed")
    cache.append(*pair_of_tokens(subject, 2 * cache.config["window"] + 1))
    loaded.load(cache.save())
    keys, values = pair_of_tokens(subject, 1)
    query, length = queries(subject, 1), int(cache.length) + 1
    got = np.array(loaded.step(query, keys, values, even(subject)))
    cache.append(keys, values)
    held = seen(length - 1, **{name: cache.config[name] for name in ("window", "sinks", "chunk")})
    want, bound = exact(subject, query, *cache.read([int(at) for at in held]), scale=even(subject))
    within(got, want, bound, "attention of a step after load, over the tokens that the saved cache contains")
