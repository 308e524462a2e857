"""Calls to a cache of recurrent state: rejected drafts, and checkpoints that are found by prefix."""

from typing import Any

import numpy as np

from kvref_conformance.testlib.assertions import raises
from player_traces.recorder import TraceRecorder

PROMPT = [1, 2, 3, 4, 5]


def record_recurrent(trace: TraceRecorder) -> None:
    """A state that is rolled back, copied and found by prefix"""
    trace.note(
        "One layer with a convolution of three taps, so that a state contains two inputs. Every second length is a boundary."
    )
    cache = trace.new(
        "recurrent", num_blocks=5, num_layers=1, num_heads=1, channels=1, num_inputs=2, key_dim=1, value_dim=1, delta_rule=0,
        max_drafts=2, interval=2, dtype="float32", matrix_dtype="float32",
    )  # fmt: skip

    def append(sequence: Any, count: int) -> None:
        tokens = trace.tokens(1, count, 1, 1)
        cache.append(sequence, tokens, 0 * tokens + 1, tokens, np.ones((1, count, 1, 2), np.float32))

    trace.note("A new sequence has the zero state, whatever its block contained before (RECUR-06).")
    sequence = cache.create()
    trace.note("The first two tokens of a prompt. The matrix is a sum over both; the inputs are the last two.")
    append(sequence, 2)
    trace.note("A checkpoint: a copy of the state at length 2, in a block of its own (RECUR-10).")
    cache.checkpoint(sequence)
    trace.note("The prompt goes on. The state at length 2 exists in the checkpoint alone.")
    append(sequence, 2)
    trace.note("A checkpoint at the next boundary, 4.")
    cache.checkpoint(sequence)
    append(sequence, 1)
    trace.note("The cache learns the tokens. Both checkpoints are at boundaries: they are cached (RECUR-12).")
    cache.commit(sequence, PROMPT)
    trace.note("Two drafts in one append. The states before each of them are kept, because max_drafts is 2.")
    append(sequence, 2)
    trace.note("The second one is rejected. The state is that of the prompt and the accepted draft (RECUR-09).")
    cache.truncate(sequence, 6)
    trace.note(
        "Length 3 is no checkpoint, and no draft ended there: the state cannot be restored, and nothing changes (RECUR-08)."
    )
    with raises("NotTruncatable"):
        cache.truncate(sequence, 3)
    trace.note("Back to the checkpoint at 4. Inputs and matrix are those of the first four tokens again.")
    cache.truncate(sequence, 4)
    trace.note("A fork copies the state, and shares the checkpoints (RECUR-07).")
    fork = cache.fork(sequence)
    append(fork, 1)
    trace.note("The same prompt again: the hit is 4, because a hit is less than the number of tokens (RECUR-11).")
    cache.match(PROMPT)
    trace.note("Both sequences end. Their checkpoints stay cached; they can be evicted, the longer one first (RECUR-14).")
    cache.drop(fork)
    cache.drop(sequence)
    cache.num_free_blocks
    trace.note("A new request begins from the checkpoint at 4, and has it: it is not evicted now.")
    begun = cache.begin(PROMPT)
    cache.length(begun)
    append(begun, 1)
    trace.note("Three more sequences. There is no other block for the last one, so the checkpoint at 2 is evicted.")
    for _ in range(3):
        cache.create()
    cache.num_free_blocks
    cache.match([1, 2, 0])
