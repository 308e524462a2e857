"""vLLM on a CPU with a canary and the example connector: a prompt that is one token longer than a stored one ends the engine."""

import os

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

from pathlib import Path

from vllm import LLM, SamplingParams

from kvref.canary import BOS, FIRST_WORD, sized
from kvref_canary.files import huggingface

canary = sized(num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=64, context=256, period=32)
huggingface.write_folder(Path("canary"), huggingface.make_files(canary, "llama", "float32"))
connector = {
    "kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"shared_storage_path": "stored"},
}  # fmt: skip
model = LLM(
    "canary", dtype="float32", enforce_eager=True, skip_tokenizer_init=True, block_size=32, enable_prefix_caching=False,
    max_num_batched_tokens=256, kv_transfer_config=connector,
)  # fmt: skip
asked = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
words = [BOS, *range(FIRST_WORD, FIRST_WORD + 64)]
for length in (64, 64, 65):
    expected = words[:length]
    while len(expected) < length + 20:
        expected.append(expected[-32])  # the canary repeats itself after 32 tokens
    try:
        (answer,) = model.generate([{"prompt_token_ids": words[:length]}], asked, use_tqdm=False)
        pairs = zip(answer.outputs[0].token_ids, expected[length:], strict=True)
        wrong = sum(token != right for token, right in pairs)
        print(f"a prompt of {length} tokens: {wrong} of 20 are wrong, {answer.num_cached_tokens} from the cache")
    except Exception as error:
        print(f"a prompt of {length} tokens: {type(error).__name__}: {error}")
