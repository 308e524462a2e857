"""The canary: a Llama with hand-constructed weights, so that each token it generates proves which cache entries were read.

In an attention head whose query and key are the same for every token, scores depend on distances only: with rotary embedding, the
score of a key d tokens back is S / m * sum_i cos((d - k) theta_i), which is largest at d = k. With a large S the head copies from
the token k back. Several such layers, whose offsets k add up to one period less one token, generate the token of one period ago.
A canary therefore repeats a prompt of one period, and the expected output is known. See kvref/spec/engines.md.

The residual stream contains a constant and num_layers + 1 parts. A part represents a token: per kv head, one number per bit, +1
or -1, and one number that marks a special token, which has no bits. Part 0 is the embedding of the token. Each layer copies the
newest part of the token that it attends to into the next part. All parts have the same length (norm), so that the weight of each
RMS norm can undo the norm.

Models with recurrent state have canaries of their own: `kvref.canary.hybrid` and `kvref.canary.hybrid_weights`.
"""

from kvref.canary.dimensions import BLANK, BOS, EOS, FIRST_WORD, UNKNOWN, Canary, sized
from kvref.canary.oracle import Oracle
from kvref.canary.weights import Weights, weights

__all__ = ["BLANK", "BOS", "EOS", "FIRST_WORD", "UNKNOWN", "Canary", "Oracle", "Weights", "sized", "weights"]
