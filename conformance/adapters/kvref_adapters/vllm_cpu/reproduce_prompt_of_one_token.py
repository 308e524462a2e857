"""vLLM on a CPU with a canary of Qwen3.5: a prompt of one token ends the engine. Needs torchvision and AVX-512 with bfloat16."""

import os

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

from pathlib import Path

from vllm import LLM, SamplingParams

from kvref.canary import FIRST_WORD
from kvref_canary.files import huggingface
from kvref_canary.files.hybrid import make_hybrid_files

huggingface.write_folder(Path("canary"), make_hybrid_files("qwen3.5", "bfloat16"))
model = LLM("canary", dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True)
asked = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
for count in (2, 1):
    prompt = {"prompt_token_ids": [FIRST_WORD] * count}
    try:
        (answer,) = model.generate([prompt], asked, use_tqdm=False)
        print(f"a prompt of {count}: {len(answer.outputs[0].token_ids)} tokens")
    except RuntimeError as error:
        print(f"a prompt of {count}: {type(error).__name__}: {error}")
