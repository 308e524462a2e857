"""Calls to caches that the player draws as rows of tokens: a speculation tree, a ragged batch, and a pruned cache."""

import numpy as np

from kvref_conformance.testlib.assertions import raises
from player_traces.recorder import TraceRecorder


def record_tree(trace: TraceRecorder) -> None:
    """A tree of drafts: one path is kept, the others leave nothing"""
    trace.note("A pool of six blocks of four tokens. The cells of a tree show the number, position and parent of each node.")
    cache = trace.new("tree", num_blocks=6, num_kv_heads=1, head_dim=1, block_size=4)
    sequence = cache.create()
    prompt = trace.tokens(2, 1, 1)
    cache.append(sequence, prompt, prompt)
    trace.note("Two candidates for the next token. Both follow the last committed token, so both are at position 2 (TREE-03).")
    first = trace.tokens(2, 1, 1)
    cache.draft(sequence, first, first, [-1, -1])
    trace.note("The second level: one node continues node 0, and two continue node 1.")
    second = trace.tokens(3, 1, 1)
    cache.draft(sequence, second, second, [0, 1, 1])
    cache.positions(sequence)
    trace.note("A query of node 4 reads the committed tokens and its path, 1 and 4; not nodes 0, 2 and 3 (TREE-05).")
    cache.attend(sequence, [4], np.zeros((1, 1, 1), np.float32))
    trace.note("While the tree is open, nothing else can follow the last committed token (TREE-09).")
    with raises("InUse"):
        cache.append(sequence, prompt, prompt)
    trace.note("The model verified node 4. Its path is committed, and the other nodes are removed (TREE-07).")
    cache.accept(sequence, 4)
    cache.read(sequence)
    trace.note("Another tree, a chain of three.")
    third = trace.tokens(3, 1, 1)
    cache.draft(sequence, third, third, [-1, 0, 1])
    cache.num_free_blocks
    trace.note("All drafts are wrong. Nothing of the tree remains, and its block is free again (TREE-08, TREE-10).")
    cache.reject(sequence)
    cache.num_free_blocks
    cache.length(sequence)


def record_ragged(trace: TraceRecorder) -> None:
    """Rows that grow, leave, repeat and join"""
    trace.note("A batch of three rows. Columns that are padding are not stored, so no picture shows them.")
    cache = trace.new("ragged", batch_size=3, num_kv_heads=1, head_dim=1, max_tokens=8)
    trace.note("Three prompts of 2, 4 and 3 tokens in an array of four columns.")
    prompts = trace.tokens(3, 1, 4, 1)
    cache.append(prompts, prompts, [2, 4, 3])
    trace.note("One generated token per row. Its position is the row's own length (RAGGED-02).")
    step = trace.tokens(3, 1, 1, 1)
    cache.append(step, step)
    cache.length(0)
    trace.note("Each query reads the tokens of its own row (RAGGED-04).")
    cache.attend(np.zeros((3, 1, 1, 1), np.float32))
    trace.note(
        "The request of row 1 ends, and row 2 is repeated, as in beam search. All parts of a row move together (RAGGED-06)."
    )
    cache.filter([2, 0, 2])
    trace.note("Two requests join: one with a prompt of two tokens, and one without any (RAGGED-07).")
    joined = trace.tokens(2, 1, 2, 1)
    cache.extend(joined, joined, [2, 0])
    cache.batch_size
    trace.note("Drafts were rejected: each row loses another number of tokens (RAGGED-08).")
    cache.trim([2, 0, 1, 1, 0])
    cache.length(0)
    cache.read(2)


def record_pruned(trace: TraceRecorder) -> None:
    """Two heads that keep different tokens"""
    cache = trace.new("pruned", num_kv_heads=2, head_dim=1, max_tokens=8)
    trace.note("A prompt of eight tokens, in each head. The cache is full.")
    prompt = trace.tokens(8, 2, 1)
    cache.append(prompt, prompt)
    token = trace.tokens(1, 2, 1)
    with raises("CapacityExceeded"):
        cache.append(token, token)
    trace.note("Each head keeps four tokens: the first, the last, and the two with the largest scores of its own (PRUNED-02).")
    scores = np.array([[0, 1, 9, 2, 8, 3, 1, 0], [0, 7, 1, 2, 3, 6, 1, 0]], np.float32)
    cache.prune(scores, 4, 1, 1)
    cache.positions(0)
    cache.positions(1)
    trace.note("The next token has position 8, although each head stores four tokens (PRUNED-04).")
    cache.append(token, token)
    trace.note("A query reads what its head stores (PRUNED-05).")
    cache.attend(np.zeros((1, 2, 1), np.float32))
    trace.note("The scores of the prompt are those of other tokens now: eight scores for five tokens are an error (PRUNED-07).")
    with raises("ShapeMismatch"):
        cache.prune(scores, 3)
    trace.note("Position 8 is at the end of both heads, so it can be removed.")
    cache.truncate(8)
    trace.note("Position 6 is evicted in both heads: a truncation to 6 cannot remove it (PRUNED-08).")
    with raises("NotTruncatable"):
        cache.truncate(6)
    cache.length
    cache.stored_tokens
