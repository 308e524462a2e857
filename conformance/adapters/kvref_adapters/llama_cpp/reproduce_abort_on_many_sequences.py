"""llama.cpp: a context with more sequences than n_batch has tokens aborts the process; another invalid parameter does not."""

import os
import subprocess
import sys
from pathlib import Path

from kvref.canary import sized
from kvref_adapters.llama_cpp.engine import LlamaContext, LlamaModel  # the functions of llama.h
from kvref_canary.files import gguf
from kvref_conformance.exceptions import CannotRun

if len(sys.argv) == 1:
    canary = sized(num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=64, context=128, period=32, window=0)
    gguf.write_gguf(Path("canary.gguf"), gguf.gguf_file(canary, "float32"))
    for sequences in (8, 9, 1000):
        quiet = os.environ | {"GGML_NO_BACKTRACE": "1"}
        child = subprocess.run([sys.executable, __file__, str(sequences)], capture_output=True, text=True, env=quiet)
        print(f"n_batch=8, n_seq_max={sequences}: exit status {child.returncode}:", (child.stdout + child.stderr).strip())
else:
    options = {"n_ctx": 256, "n_batch": 8, "type_k": "f16", "type_v": "f16", "flash_attn": -1, "kv_unified": True}
    try:
        LlamaContext(LlamaModel(Path("canary.gguf")), n_seq_max=int(sys.argv[1]), **options)
        print("created")
    except CannotRun:
        print("llama_init_from_model returned NULL")
