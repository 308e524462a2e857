"""llama.cpp with a canary: a copy between sequences is pending until the next `llama_decode`; saving and loading ignore that."""

from pathlib import Path

from kvref.canary import BOS, FIRST_WORD, sized
from kvref_adapters._shared.llama_sessions import BatchRow
from kvref_adapters.llama_cpp.engine import LlamaContext, LlamaModel  # the functions of llama.h
from kvref_canary.files import gguf

canary = sized(num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=64, context=128, period=32, window=0)
gguf.write_gguf(Path("canary.gguf"), gguf.gguf_file(canary, "float32"))
options = {"type_k": "f16", "type_v": "f16", "flash_attn": -1, "kv_unified": False}  # a separate part of the cache per sequence
first, second = ([BOS, *range(start, start + 60)] for start in (FIRST_WORD, FIRST_WORD + 100))
for decoded in ("no llama_decode between", "a llama_decode between"):
    for case in ("the copy of a sequence is saved", "a sequence is loaded in the place of a removed copy"):
        context = LlamaContext(LlamaModel(Path("canary.gguf")), n_ctx=640, n_batch=256, n_seq_max=5, **options)
        for sequence, tokens in enumerate((first, second)):
            context.decode([BatchRow(token, at, sequence, False) for at, token in enumerate(tokens)])
        saved = context.seq_get(1)
        context.seq_cp(1 if case.endswith("saved") else 0, 2)
        if decoded == "a llama_decode between":
            context.decode([BatchRow(BOS, 0, 4, False)])  # of another sequence
        if case.endswith("saved"):
            saved, target = context.seq_get(2), 3
        else:
            context.seq_rm(2, 0, -1)
            target = 2
        context.seq_set(target, saved)  # of the second sequence in both cases
        context.decode([BatchRow(second[29], len(second), target, True)])
        print(f"{case}, {decoded}: expected {second[30]}, generated {context.logits(0, canary.vocabulary).argmax()}")
