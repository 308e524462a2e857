"""vLLM on a CPU with a canary and a server of LMCache: a request that is aborted while its prefix is loaded ends the engine."""

import os
import subprocess
import time
from pathlib import Path

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}

from vllm import LLM, SamplingParams

from kvref.canary import BOS, FIRST_WORD, sized
from kvref_canary.files import huggingface

if __name__ == "__main__":
    canary = sized(num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=64, context=1024, period=32)
    huggingface.write_folder(Path("canary"), huggingface.make_files(canary, "llama", "float32"))
    command = ["lmcache", "server", "--port", "15555", "--http-port", "15556", "--chunk-size", "32", "--l1-size-gb", "0.5"]
    options = ["--no-l1-use-lazy", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto"]
    server = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
    try:
        model = LLM(
            "canary", dtype="float32", enforce_eager=True, skip_tokenizer_init=True, block_size=32, enable_prefix_caching=False,
            kv_transfer_config={
                "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": {"lmcache.mp.port": 15555},
            },
        )  # fmt: skip
        asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        prompt = {"prompt_token_ids": [BOS, *(FIRST_WORD + place % 97 for place in range(900))]}
        for number in range(41):
            (answer,) = model.generate([prompt], asked, use_tqdm=False)
            print(f"{number} requests aborted: an answer of {len(answer.outputs[0].token_ids)} tokens, "
                  f"{answer.num_cached_tokens} tokens of its prompt from the server", flush=True)  # fmt: skip
            model.llm_engine.add_request(str(number), prompt, asked)
            time.sleep(number / 1000)
            model.llm_engine.abort_request([str(number)])
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    finally:
        server.terminate()
