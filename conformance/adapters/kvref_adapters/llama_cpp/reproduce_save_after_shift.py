"""llama.cpp with a canary: a sequence saved directly after a context shift contains keys that are never rotated."""

from pathlib import Path

from kvref.canary import BOS, FIRST_WORD, sized
from kvref_adapters._shared.llama_sessions import BatchRow
from kvref_adapters.llama_cpp.engine import LlamaContext, LlamaModel  # the functions of llama.h
from kvref_canary.files import gguf

canary = sized(num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=64, context=128, period=32, window=0)
gguf.write_gguf(Path("canary.gguf"), gguf.gguf_file(canary, "float32"))
options = {"type_k": "f16", "type_v": "f16", "flash_attn": -1, "kv_unified": True}
tokens = [BOS, *range(FIRST_WORD, FIRST_WORD + 60)]
for when in ("saved immediately", "saved after a llama_decode"):
    context = LlamaContext(LlamaModel(Path("canary.gguf")), n_ctx=256, n_batch=256, n_seq_max=3, **options)
    context.decode([BatchRow(token, at, 0, False) for at, token in enumerate(tokens)])
    context.seq_rm(0, 20, 30)
    context.seq_add(0, 30, -10)
    if when != "saved immediately":
        context.decode([BatchRow(BOS, 0, 2, False)])  # of another sequence
    context.seq_set(1, context.seq_get(0))
    for sequence in (0, 1):
        context.decode([BatchRow(tokens[-1], 51, sequence, True)])
        print(when, "sequence", sequence, "generates", context.logits(0, canary.vocabulary).argmax())
