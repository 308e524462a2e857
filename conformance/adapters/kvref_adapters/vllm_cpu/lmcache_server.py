"""Adapters of vLLM on a CPU with LMCache: a server of LMCache, a process of its own, stores keys and values.

`LMCacheMPConnector` stores whole chunks of tokens, of prompts and answers, and retrieves the longest prefix that is stored. The
other connector of LMCache, which needs no server, has no support for a CPU (findings.md).
"""

import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any, ClassVar
from urllib.request import urlopen

from kvref.canary.hybrid import AnyCanary
from kvref_adapters._shared import die_with_parent
from kvref_adapters.vllm_cpu.disaggregated import free_port
from kvref_adapters.vllm_cpu.engine import BLOCK, Engines, VllmOfOwnProcess

os.environ |= {"LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_TRACK_USAGE": "false"}

GIGABYTES = 0.02  # of the server's memory, for about 10,000 tokens
SECONDS = 300  # until the server must have started
SERVERS: list[subprocess.Popen[bytes]] = []  # kept, because a server ends when its standard input is closed


class VllmLMCache(VllmOfOwnProcess):
    """Without prefix caching of vLLM, so that all prefixes come from the server. A chunk has the tokens of a block."""

    name = "vllm-lmcache"
    options: ClassVar[dict[str, Any]] = {"enable_prefix_caching": False}

    def _start(self, canary: AnyCanary, folder: Path, blocks: int) -> Engines:
        more = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": start_server(), "lmcache.mp.save_decode_cache": True}
        transfer = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": more}
        return (self._start_one(canary, folder, blocks, kv_transfer_config=transfer),)


@cache
def start_server() -> int:
    """Start a server of LMCache, which ends with this process. Returns its port."""
    port, http = free_port(), free_port()
    command = ["--host", "127.0.0.1", "--port", port, "--http-port", http, "--chunk-size", BLOCK]
    command += ["--l1-size-gb", GIGABYTES, "--no-l1-use-lazy", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto"]
    server = subprocess.Popen(
        [sys.executable, die_with_parent.__file__, Path(sys.executable).with_name("lmcache"), "server", *map(str, command)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    SERVERS.append(server)
    deadline = time.monotonic() + SECONDS
    while not _answers(http):
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"lmcache server: expected an answer within {SECONDS} s, got none (exit status {server.poll()})")
        time.sleep(0.2)
    return port


def _answers(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/healthcheck", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
