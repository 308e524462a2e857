"""vLLM on a CPU with a canary of Mamba-2: with prefix caching, a prompt longer than a block ends the engine."""

import os

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

from pathlib import Path

from vllm import LLM, SamplingParams

from kvref.canary.hybrid import continued_text
from kvref_canary.files import huggingface
from kvref_canary.files.hybrid import make_hybrid_files

huggingface.write_folder(Path("canary"), make_hybrid_files("mamba2", "float32"))
text = continued_text("mamba2", 0, 460)
for prefixes, together in ((False, 1024), (True, 128), (True, 1024)):
    model = LLM(
        "canary", dtype="float32", enforce_eager=True, skip_tokenizer_init=True, block_size=128,
        enable_prefix_caching=prefixes, max_num_batched_tokens=together,
    )  # fmt: skip
    asked = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)
    title = f"prefix caching {prefixes}, at most {together} tokens together"
    try:
        for _ in range(2):
            (answer,) = model.generate([{"prompt_token_ids": text[:400]}], asked, use_tqdm=False)
            wrong = sum(token != right for token, right in zip(answer.outputs[0].token_ids, text[400:], strict=True))
            print(f"{title}: {wrong} of 60 tokens are wrong, {answer.num_cached_tokens} of 400 tokens from the cache")
    except IndexError as error:
        print(f"{title}: {type(error).__name__}: {error}")
    del model
