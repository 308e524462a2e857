"""Checks of LAW-19: no call, valid or not, brings a count out of its bounds."""

from kvref_conformance.checking.counts import tried, within_bounds
from kvref_conformance.checking.registry import law
from kvref_conformance.checking.streams import Stream

TOKENS = 11, 29  # the number appended first, and the largest number after all calls


@law("LAW-19", "wrong_use", "counters")
def counters_stay_counters(stream: Stream) -> None:
    stream.append(*stream.tokens(TOKENS[0]))
    for name, args in stream.wrong_use():
        tried(getattr(stream.cache, name), *args)
        shown = ", ".join(str(arg) for arg in args if isinstance(arg, int))
        within_bounds(stream.counters(sum(TOKENS)), f"{name}({shown})")
