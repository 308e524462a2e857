"""ik_llama.cpp with a canary: the next token of the second sequence of a cache, after a first sequence of 16 or 128 tokens."""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from ik_llama_cpp import _ctypes_api as api

from kvref.canary import BOS, FIRST_WORD, sized
from kvref_canary.files import gguf

canary = sized(num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=64, context=128, period=12, window=0)  # a small Llama
PROMPT = [BOS, *range(FIRST_WORD, FIRST_WORD + 15)]  # the next token is the one 12 positions before


def decode(context: object, sequence: int, start: int, tokens: list[int]) -> int:
    batch = api.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for at, token in enumerate(tokens):
        batch.token[at], batch.pos[at], batch.logits[at] = token, start + at, at == len(tokens) - 1
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
    assert api.llama_decode(context, batch) == 0
    return int(np.ctypeslib.as_array(api.llama_get_logits_ith(context, len(tokens) - 1), (canary.vocabulary,)).argmax())


def generate(flash: bool, first: int, batched: bool) -> int:
    """The token after a prompt in the second sequence. first: tokens in the first sequence."""
    with tempfile.TemporaryDirectory() as folder:
        gguf.write_gguf(Path(folder, "canary.gguf"), gguf.gguf_file(canary, "float32"))
        model = api.llama_model_load_from_file(f"{folder}/canary.gguf".encode(), api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.n_threads, params.n_threads_batch, params.flash_attn = 256, 2, 1, 1, flash
    context = api.llama_init_from_model(model, params)
    decode(context, 0, 0, [BOS, *(FIRST_WORD + at % 50 for at in range(first - 1))])
    token = 0
    for start, tokens in [(0, PROMPT)] if batched else [(at, [token]) for at, token in enumerate(PROMPT)]:
        token = decode(context, 1, start, tokens)
    return token


if len(sys.argv) > 1:
    flash, first, batched = map(int, sys.argv[1:])
    print("generated", generate(bool(flash), first, bool(batched)))
    sys.exit()
for flash in (0, 1):
    for first in (16, 128):
        for batched in (0, 1):
            arguments = [sys.executable, __file__, str(flash), str(first), str(batched)]
            child = subprocess.run(arguments, capture_output=True, text=True, check=False)
            ending = next((line.rsplit("/")[-1] for line in child.stderr.splitlines() if "GGML_ASSERT" in line), "")
            result = f"the process ended with {child.returncode}: {ending}" if child.returncode else child.stdout.strip()
            how = "in one batch" if batched else "one by one"
            print(f"flash_attn={flash}, {first} tokens before, {how}: expected {PROMPT[4]}, {result}")
