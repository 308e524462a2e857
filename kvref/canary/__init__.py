"""The canary: a Llama whose weights are made by hand, so that every token it says proves which cache entries were read.

An attention head whose query and key are the same for every token scores distances alone: with rotary positions the score of a
key d tokens back is S / m * sum_i cos((d - k) theta_i), largest at d = k. Made sharp, it copies the token k back. One such layer
behind the other, with offsets that add up to one period less a token, say next what was said a period ago: a prompt of one
period goes on by itself for ever, and what has to be said is a list. See kvref/spec/engines.md.

In the residual stream lie a constant and, for each layer and one more, a part: one number a bit of the token, +1 or -1, head by
head, and one a head that says "no bits: a special token". Each layer copies the newest part of the place it looks at into the
next. Every part has the same length, so that each norm's weight undoes the norm.
"""

from kvref.canary.oracle import Oracle
from kvref.canary.shape import BLANK, BOS, EOS, FIRST_WORD, UNKNOWN, Canary
from kvref.canary.sized import sized
from kvref.canary.weights import Weights, weights

__all__ = ["BLANK", "BOS", "EOS", "FIRST_WORD", "UNKNOWN", "Canary", "Oracle", "Weights", "sized", "weights"]
