"""vLLM on a CPU with a canary, with NIXL: a prompt that is read after its lease has expired is continued with wrong tokens."""

import os
import time
from pathlib import Path

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}

from vllm import LLM, SamplingParams

from kvref.canary import BOS, FIRST_WORD, sized
from kvref_canary.files import huggingface

LEASE = 6  # seconds; 30 is the default


def engine(port: int) -> LLM:
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)  # read by the process of the engine
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"kv_lease_duration": LEASE}}
    return LLM(
        "canary", dtype="float32", enforce_eager=True, skip_tokenizer_init=True, block_size=32, max_model_len=128,
        max_num_seqs=4, num_gpu_blocks_override=9, kv_transfer_config=transfer,
    )  # fmt: skip


def generate(model: LLM, prompt: list[int], count: int, transfer: dict | None) -> tuple[list[int], dict | None]:
    extra = {"kv_transfer_params": transfer} if transfer else None
    asked = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, extra_args=extra)
    (answer,) = model.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
    return list(answer.outputs[0].token_ids), answer.kv_transfer_params


if __name__ == "__main__":
    canary = sized(num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=64, context=128, period=32)
    huggingface.write_folder(Path("canary"), huggingface.make_files(canary, "llama", "float32"))
    prefill, decode = engine(25600), engine(25700)
    for seconds, start in ((0, 0), (2 * LEASE, 100)):
        prompt = [BOS, *range(FIRST_WORD + start, FIRST_WORD + start + 79)]
        _, sent = generate(prefill, prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
        time.sleep(seconds)
        for other in range(4):  # needs the blocks of the prompt, if they are free
            generate(prefill, [BOS, *range(FIRST_WORD + 80 - 20 * other, FIRST_WORD + 80 - 20 * other + 99)], 1, None)
        answer, _ = generate(decode, prompt, 10, sent)
        expected = prompt[-32:][:10]  # the canary repeats itself after 32 tokens
        wrong = sum(token != right for token, right in zip(answer, expected, strict=True))
        print(f"read {seconds} seconds after the prefill, with a lease of {LEASE}: {wrong} of 10 tokens are wrong", flush=True)
