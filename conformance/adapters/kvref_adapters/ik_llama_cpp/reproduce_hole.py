"""ik_llama.cpp with a canary: the next token of the last of three sequences, before and after the second one is removed."""

import ctypes
import tempfile
from pathlib import Path

import numpy as np
from ik_llama_cpp import _ctypes_api as api

from kvref.canary import BOS, FIRST_WORD, sized
from kvref_canary.files import gguf

canary = sized(num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=64, context=256, period=12, window=0)  # a small Llama
api.llama_backend_init()
api._lib.llama_kv_cache_seq_rm.argtypes = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32)
with tempfile.TemporaryDirectory() as folder:
    gguf.write_gguf(Path(folder, "canary.gguf"), gguf.gguf_file(canary, "float32"))
    model = api.llama_model_load_from_file(f"{folder}/canary.gguf".encode(), api.llama_model_default_params())


def decode(context: object, sequence: int, start: int, tokens: list[int]) -> int:
    batch = api.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for at, token in enumerate(tokens):
        batch.token[at], batch.pos[at], batch.logits[at] = token, start + at, at == len(tokens) - 1
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
    assert api.llama_decode(context, batch) == 0
    return int(np.ctypeslib.as_array(api.llama_get_logits_ith(context, len(tokens) - 1), (canary.vocabulary,)).argmax())


for flash, padding in ((False, 32), (True, 256)):  # llama.cpp's padding of the number of cells that attention reads
    for removed in (False, True):
        params = api.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_threads, params.n_threads_batch, params.flash_attn = 3 * padding, 3, 1, 1, flash
        context, length = api.llama_init_from_model(model, params), padding // 2
        prompt = [BOS, *(FIRST_WORD + at % 50 for at in range(length - 1))]
        generated = [decode(context, sequence, 0, prompt) for sequence in range(3)][2:]
        if removed:
            api._lib.llama_kv_cache_seq_rm(context, 1, 0, -1)
        for at in range(length, length + 3):
            generated.append(decode(context, 2, at, generated[-1:]))
        print(f"flash_attn={flash}, sequences of {length} tokens, second one removed={removed}: "
              f"expected {prompt[length - 12 : length - 8]}, generated {generated}")  # fmt: skip
