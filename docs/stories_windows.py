"""The story of a ring behind two sinks: see stories.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvref_conformance.checking.expect import raises

if TYPE_CHECKING:
    from stories import Told


def windows(tell: Told) -> None:
    """A ring that turns, and turns back"""
    tell("A window of four tokens behind two sinks, and two slots more, so that two tokens can be taken back: a ring of six.")
    sizes = {"num_kv_heads": 1, "head_dim": 2, "window": 4, "sinks": 2, "rollback": 2, "dtype": "float32"}
    cache = tell.new("windowed", chunk=0, **sizes)

    def step(count: int) -> None:
        query, keys, values = (tell.tokens(count, 1, 2) for _ in range(3))
        cache.step(query, keys, values, 0.01)

    tell("The prompt. Its first two tokens are the sinks, and stay for ever (WIN-05); the others begin the ring.")
    step(6)
    tell("The newest, at 5, sees the sinks and four tokens, itself among them: 2 to 5 (WIN-01).")
    cache.attend(tell.tokens(1, 1, 2), 0.01)
    tell("One more, at 6. Token 2 has left the window, and is held still: whoever goes back to position 5 will want it.")
    step(1)
    tell("Another. The ring is full.")
    step(1)
    tell("It turns: token 8 goes where token 2 was, in slot 2 + (8 - 2) mod 6. A slot is not a position.")
    step(1)
    tell("Token 2 is gone. To read slot 2 for it would be to read token 8 (WIN-03).")
    with raises("PositionOutOfRange"):
        cache.read([2])
    tell("A small model drafts two tokens, and both are looked at in one step. They overwrite tokens 3 and 4.")
    step(2)
    tell("Both are rejected: back to nine tokens. Slots 3 and 4 hold nobody's tokens now; what was there before is gone.")
    cache.truncate(9)
    tell("But the next query, at 9, sees 6 to 8 of the ring, and those are held: that is what two slots more are for (WIN-06).")
    cache.read([0, 1, 6, 7, 8])
    tell("Back to position 7? A query there sees token 4, which the draft overwrote. It is refused, and nothing has changed.")
    with raises("NotTruncatable"):
        cache.truncate(7)
    tell("The model's own token, at 9, goes where the draft's first was, and sees what it would have seen without any draft.")
    step(1)
    tell("Eight tokens at once, more than the ring has slots. All queries attend before one token is written (WIN-02).")
    step(8)
    tell("Of the eight, six are left: what the same eight would leave one by one (LAW-06). The sinks are where they were.")
    cache.read([0, 1, 15, 16, 17])
    tell("However many came, no more than eight are stored (WIN-04).")
    cache.stored_tokens


STORIES = (windows,)
