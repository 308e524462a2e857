"""LAW-19: whatever is done to a cache, no count is ever out of its bounds."""

from kvref_conformance.checking.counts import tried, within_bounds
from kvref_conformance.checking.registry import law
from kvref_conformance.checking.streams import Stream

TOKENS = 11, 29  # handed to a cache first, and at most in all


@law("LAW-19", "wrong_use", "counters")
def counters_stay_counters(stream: Stream) -> None:
    stream.append(*stream.tokens(TOKENS[0]))
    for name, args in stream.wrong_use():
        tried(getattr(stream.cache, name), *args)
        shown = ", ".join(str(arg) for arg in args if isinstance(arg, int))
        within_bounds(stream.counters(sum(TOKENS)), f"{name}({shown})")
