"""One transfer from a prefill engine to a decode engine, and one that is aborted."""

import numpy as np

from kvref import TransferCache, TransferConfig
from kvref.errors import KVRefError
from kvref_labs.quiz import ask


def new(num_blocks, block_size):
    """Two layers, one head."""
    sizes = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 1, "num_blocks": num_blocks, "block_size": block_size}
    return TransferCache(TransferConfig(**sizes))


def error(call, *arguments):
    """The name of the error that a call raises, or "none"."""
    try:
        call(*arguments)
    except KVRefError as raised:
        return type(raised).__name__
    return "none"


def rows(tokens):
    return np.ones((tokens, 1, 1), np.float32)


# The sender: five tokens in blocks of four tokens. One more token is appended while an export holds the sequence.
prefill = new(num_blocks=10, block_size=4)
prompt = prefill.create()
prefill.append(prompt, np.stack([rows(5)] * 2), np.stack([rows(5)] * 2))
ask(1, prefill.num_free_blocks)
handle = prefill.export(prompt)
ask(2, prefill.num_free_blocks)
prefill.append(prompt, np.stack([rows(1)] * 2), np.stack([rows(1)] * 2))
ask(3, prefill.num_free_blocks)
prefill.drop(prompt)
ask(4, prefill.num_free_blocks)

# The receiver: blocks of two tokens. The second layer arrives first.
decode = new(num_blocks=10, block_size=2)
first = decode.begin(5)
ask(5, decode.num_free_blocks)
for layer in (1, 0):
    if layer == 0:
        ask(6, error(decode.commit, first))
    decode.arrive(first, layer, 0, [0, 1], *prefill.send(handle, layer, [0, 5], [0, 1]))
ask(7, error(decode.arrive, first, 0, 4, [0, 1], rows(1), rows(1)))
decode.commit(first)
prefill.release(handle)

# A second request is cancelled while a write of the sender is in flight. Then a third one of two tokens arrives.
second = decode.begin(3)
decode.abort(second)
ask(8, decode.num_free_blocks)
ask(9, error(decode.begin, 2))
decode.fence(second)
ask(10, decode.num_free_blocks)
