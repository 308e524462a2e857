"""ik_llama.cpp: what an aborted `llama_decode` returns, and how many contexts a process can have."""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from ik_llama_cpp import _ctypes_api as api

from kvref.canary import BOS, FIRST_WORD, sized
from kvref_canary.files import gguf

canary = sized(num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=64, context=128, period=32, window=0)  # a small Llama
api.llama_backend_init()
with tempfile.TemporaryDirectory() as folder:
    gguf.write_gguf(Path(folder, "canary.gguf"), gguf.gguf_file(canary, "float32"))
    model = api.llama_model_load_from_file(f"{folder}/canary.gguf".encode(), api.llama_model_default_params())
params = api.llama_context_default_params()
params.n_ctx, params.flash_attn = 64, False


def decode(aborted: bool) -> np.ndarray:
    stop = api.ggml_abort_callback(lambda data: aborted)
    params.abort_callback = stop
    context, batch = api.llama_init_from_model(model, params), api.llama_batch_init(8, 0, 1)
    batch.n_tokens = 8
    for at in range(8):
        batch.token[at], batch.pos[at], batch.logits[at] = FIRST_WORD + at if at else BOS, at, at == 7
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
    print(f"llama_decode, aborted={aborted}: {api.llama_decode(context, batch)}")
    return np.ctypeslib.as_array(api.llama_get_logits_ith(context, 7), (canary.vocabulary,)).copy()


if sys.argv[1:] == ["contexts"]:
    contexts = []
    while True:
        contexts.append(api.llama_init_from_model(model, params))
        print(f"context {len(contexts)}: {'created' if contexts[-1] else 'none'}", flush=True)
print("largest difference of the logits:", abs(decode(False) - decode(True)).max())
child = subprocess.run([sys.executable, __file__, "contexts"], capture_output=True, text=True, check=False)
print(f"{child.stdout.strip().splitlines()[-1]}, then the process ended with {child.returncode}")
