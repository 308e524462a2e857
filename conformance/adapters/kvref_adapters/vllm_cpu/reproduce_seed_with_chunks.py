"""vLLM on a CPU with a canary: a request with a seed, whose prompt is computed in two steps, ends the engine for all requests."""

import os

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

from pathlib import Path

from vllm import LLM, SamplingParams

from kvref.canary import BOS, FIRST_WORD, sized
from kvref_canary.files import huggingface

canary = sized(num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=64, context=256, period=32)
huggingface.write_folder(Path("canary"), huggingface.make_files(canary, "llama", "float32"))
model = LLM("canary", dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_num_batched_tokens=64, max_num_seqs=8)
for length, options in ((60, {"seed": 1}), (100, {}), (100, {"seed": 1})):
    prompt = {"prompt_token_ids": [BOS, *range(FIRST_WORD, FIRST_WORD + length - 1)]}
    asked = SamplingParams(max_tokens=5, ignore_eos=True, detokenize=False, temperature=1.0, **options)
    try:
        (answer,) = model.generate([prompt], asked, use_tqdm=False)
        print(f"prompt of {length} tokens, {options}: {len(answer.outputs[0].token_ids)} tokens")
    except RuntimeError as error:
        print(f"prompt of {length} tokens, {options}: {type(error).__name__}: {error}")
