"""ik_llama.cpp: logits of tokens that are decoded one by one in several sequences, with and without flash attention."""

import tempfile
from pathlib import Path

import numpy as np
from ik_llama_cpp import _ctypes_api as api

from kvref.canary import BOS, FIRST_WORD, sized, weights
from kvref_canary.files import gguf

canary = sized(num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=64, context=128, period=32, window=0)
random = np.random.default_rng(0)
gguf.weights = lambda canary: {  # type: ignore[attr-defined]  # a Llama of the canary's sizes with random weights
    name: np.ones_like(tensor) if tensor.ndim == 1 else random.normal(0, 0.15, tensor.shape).astype(np.float32)
    for name, tensor in weights(canary).items()
}
tokens = [BOS, *(FIRST_WORD + at % 20 for at in range(7))]
api.llama_backend_init()
with tempfile.TemporaryDirectory() as folder:
    gguf.write_gguf(Path(folder, "canary.gguf"), gguf.gguf_file(canary, "float32"))
    model = api.llama_model_load_from_file(f"{folder}/canary.gguf".encode(), api.llama_model_default_params())


def logits_of(flash: bool, sequences: int) -> list[np.ndarray]:
    params = api.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.flash_attn = 256, 4, flash
    context, found = api.llama_init_from_model(model, params), []
    for sequence in range(sequences):
        for position, token in enumerate(tokens):
            batch = api.llama_batch_init(1, 0, 1)
            batch.n_tokens, batch.token[0], batch.pos[0], batch.logits[0] = 1, token, position, 1
            batch.n_seq_id[0], batch.seq_id[0][0] = 1, sequence
            assert api.llama_decode(context, batch) == 0
        found.append(np.ctypeslib.as_array(api.llama_get_logits_ith(context, 0), (canary.vocabulary,)).copy())
    return found


expected = logits_of(False, 1)[0]
print(f"logits in [{expected.min():.0f}, {expected.max():.0f}], next token {expected.argmax()}")
for flash in (False, True):
    for sequence, got in enumerate(logits_of(flash, 3)):
        print(f"flash_attn={flash}, sequence {sequence}: error {abs(got - expected).max():.3g}, next token {got.argmax()}")
