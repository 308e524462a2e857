"""llama-cpp-python: tokens that `Llama.generate` returns up to the end of the context, with and without drafts."""

import tempfile
from itertools import islice
from pathlib import Path

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from kvref.canary import BOS, FIRST_WORD, sized
from kvref_canary.files import gguf

canary = sized(num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=64, context=512, period=32, window=0)  # a small Llama
with tempfile.TemporaryDirectory() as folder:
    file = str(Path(folder, "canary.gguf"))
    gguf.write_gguf(Path(file), gguf.gguf_file(canary, "float32"))
    for n_ctx in (256, 300, 512):
        for draft_model in (None, LlamaPromptLookupDecoding(num_pred_tokens=4)):
            llama = llama_cpp.Llama(file, n_ctx=n_ctx, draft_model=draft_model, verbose=False)
            prompt, tokens = [BOS, *(FIRST_WORD + at % 20 for at in range(n_ctx - 40))], []
            try:
                for token in islice(llama.generate(prompt, temp=0.0, repeat_penalty=1.0), n_ctx - len(prompt)):
                    tokens.append(token)
                ending = "no error"
            except ValueError as error:
                ending = f"ValueError: {error}"
            print(
                f"n_ctx={n_ctx} (n_ctx() returns {llama.n_ctx()}), drafts={draft_model is not None}: "
                f"{len(tokens)} of {n_ctx - len(prompt)} tokens, {ending}"
            )
