"""Calls to a windowed cache: a ring after two sink tokens."""

from kvref_conformance.testlib.assertions import raises
from player_traces.recorder import TraceRecorder


def record_windows(trace: TraceRecorder) -> None:
    """A ring that wraps around, and a truncated draft"""
    trace.note(
        "A window of four tokens, two sink tokens, and two more slots so that two tokens can be truncated: a ring of six slots."
    )
    sizes = {"num_kv_heads": 1, "head_dim": 2, "window": 4, "sinks": 2, "rollback": 2, "dtype": "float32"}
    cache = trace.new("windowed", chunk=0, **sizes)

    def step(count: int) -> None:
        query, keys, values = (trace.tokens(count, 1, 2) for _ in range(3))
        cache.step(query, keys, values, 0.01)

    trace.note("The prompt. Its first two tokens are the sink tokens and are never evicted (WIN-05); the others fill the ring.")
    step(6)
    trace.note("The query at 5 sees the sink tokens and four tokens with its own: 2 to 5 (WIN-01).")
    cache.attend(trace.tokens(1, 1, 2), 0.01)
    trace.note(
        "One more, at 6. Token 2 has left the window but stays stored: after a truncation to 5 tokens it is visible again."
    )
    step(1)
    trace.note("Another token. The ring is full.")
    step(1)
    trace.note("The ring wraps around: token 8 replaces token 2, in slot 2 + (8 - 2) mod 6. A slot is not a position.")
    step(1)
    trace.note("Token 2 is evicted, so reading it raises. Its slot contains token 8 (WIN-03).")
    with raises("PositionOutOfRange"):
        cache.read([2])
    trace.note("A small model drafts two tokens, and one step appends both. They overwrite tokens 3 and 4.")
    step(2)
    trace.note("Both are rejected: truncate to nine tokens. Slots 3 and 4 contain no valid token now; tokens 3 and 4 are gone.")
    cache.truncate(9)
    trace.note(
        "The next query, at 9, sees 6 to 8 of the ring, and these are still stored, thanks to the two more slots (WIN-06)."
    )
    cache.read([0, 1, 6, 7, 8])
    trace.note("Truncating to 7 raises and changes nothing: a query at 7 sees token 4, which the draft has overwritten.")
    with raises("NotTruncatable"):
        cache.truncate(7)
    trace.note(
        "The model's own token, at 9, replaces the first draft token, and its query sees what it would see without a draft."
    )
    step(1)
    trace.note("Eight tokens in one step, more than the ring has slots. All queries attend before any token is written (WIN-02).")
    step(8)
    trace.note("Six of the eight are stored, as if they had been appended one by one (LAW-06). The sink tokens are unchanged.")
    cache.read([0, 1, 15, 16, 17])
    trace.note("However many tokens are appended, at most eight are stored (WIN-04).")
    cache.stored_tokens
