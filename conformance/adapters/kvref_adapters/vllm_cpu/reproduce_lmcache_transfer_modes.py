"""vLLM on a CPU with a canary, and a server of LMCache with its default options: the engine does not start."""

import os
import subprocess
import time
from pathlib import Path

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}

from vllm import LLM

from kvref.canary import sized
from kvref_canary.files import huggingface

SECONDS = 30  # until a request to the server fails; 300 is the default

if __name__ == "__main__":
    canary = sized(num_layers=2, num_kv_heads=2, num_query_heads=4, head_dim=64, context=128, period=32)
    huggingface.write_folder(Path("canary"), huggingface.make_files(canary, "llama", "float32"))
    command = ["lmcache", "server", "--port", "15555", "--http-port", "15556", "--chunk-size", "32", "--l1-size-gb", "1"]
    connector = {
        "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.port": 15555, "lmcache.mp.mq_timeout": SECONDS},
    }  # fmt: skip
    for options in (["--supported-transfer-mode", "auto"], []):
        server = subprocess.Popen([*command, "--no-l1-use-lazy", "--eviction-policy", "LRU", *options], stdout=subprocess.DEVNULL)
        start = time.monotonic()
        try:
            LLM("canary", enforce_eager=True, skip_tokenizer_init=True, block_size=32, kv_transfer_config=connector)
            print(f"{options}: the engine starts", flush=True)
        except Exception as error:
            print(f"{options}: after {time.monotonic() - start:.0f} seconds: {type(error).__name__}: {error}", flush=True)
        finally:
            server.terminate()
            server.wait()
