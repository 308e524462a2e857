"""vLLM on a CPU with a canary: with n-gram drafts, a request with a temperature makes its neighbors generate wrong tokens."""

import os

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

from pathlib import Path

from vllm import LLM, SamplingParams

from kvref.canary import BOS, FIRST_WORD, sized
from kvref_canary.files import huggingface

canary = sized(num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=64, context=256, period=32)
huggingface.write_folder(Path("canary"), huggingface.make_files(canary, "llama", "float32"))
prompts = [[BOS, *range(start, start + 40)] for start in (FIRST_WORD, FIRST_WORD + 50, FIRST_WORD + 100)]
drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
for title, speculative_config in (("without drafts", None), ("with drafts", drafts)):
    model = LLM("canary", dtype="float32", enforce_eager=True, skip_tokenizer_init=True, speculative_config=speculative_config)
    for temperatures in ((0, 0, 0), (0, 0, 0.001)):
        asked = [SamplingParams(temperature=each, max_tokens=60, ignore_eos=True, detokenize=False) for each in temperatures]
        answers = model.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
        wrong = []
        for prompt, answer in zip(prompts, answers, strict=True):
            expected = list(prompt)
            while len(expected) < len(prompt) + 60:
                expected.append(expected[-32])  # the canary repeats itself after 32 tokens
            pairs = zip(answer.outputs[0].token_ids, expected[len(prompt) :], strict=True)
            wrong.append(sum(token != right for token, right in pairs))
        print(f"{title}, temperatures {temperatures}: wrong tokens of 60 per request: {wrong}")
    del model
