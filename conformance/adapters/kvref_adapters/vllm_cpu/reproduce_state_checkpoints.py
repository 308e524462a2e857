"""vLLM on a CPU with a Mamba-2 canary: with prefix caching of states, the first prompt ends the engine."""

import os

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

from pathlib import Path

from vllm import LLM, SamplingParams

from kvref.canary import BOS
from kvref.canary.hybrid import continued_text
from kvref_canary.files import huggingface
from kvref_canary.files.hybrid import make_hybrid_files

huggingface.write_folder(Path("canary"), make_hybrid_files("mamba2", "float32"))
prompt = {"prompt_token_ids": [BOS, *continued_text("mamba2", 0, 80)]}
asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
for options in ({}, {"enable_prefix_caching": True, "mamba_cache_mode": "align"}):
    model = LLM("canary", dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_num_batched_tokens=1024, **options)
    try:
        (answer,) = model.generate([prompt], asked, use_tqdm=False)
        print(f"{options}: {len(answer.outputs[0].token_ids)} tokens")
    except IndexError as error:
        print(f"{options}: {type(error).__name__}: {error}")
    del model
