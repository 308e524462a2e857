"""vLLM on a CPU with a canary: with n-gram drafts, a request with `top_k` ends the engine for all requests."""

import os

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

from pathlib import Path

from vllm import LLM, SamplingParams

from kvref.canary import BOS, FIRST_WORD, sized
from kvref_canary.files import huggingface

canary = sized(num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=64, context=256, period=32)
huggingface.write_folder(Path("canary"), huggingface.make_files(canary, "llama", "float32"))
prompt = {"prompt_token_ids": [BOS, *range(FIRST_WORD, FIRST_WORD + 20)]}  # nothing is repeated, so there is no draft at first
drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
model = LLM("canary", dtype="float32", enforce_eager=True, skip_tokenizer_init=True, speculative_config=drafts)
for options in ({"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}):
    asked = SamplingParams(max_tokens=40, ignore_eos=True, detokenize=False, **options)
    try:
        (answer,) = model.generate([prompt], asked, use_tqdm=False)
        print(f"{options}: {len(answer.outputs[0].token_ids)} tokens")
    except RuntimeError as error:
        print(f"{options}: {type(error).__name__}: {error}")
