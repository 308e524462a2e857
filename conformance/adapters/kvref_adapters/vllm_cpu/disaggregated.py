"""Adapters of vLLM with prefill and decode in two engines on a CPU, each in a process of its own.

The prefill engine computes a prompt and generates one token. The NIXL connector sends the keys and values to the decode engine,
which generates all tokens of the answer.
"""

import os
import socket
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from kvref.canary.hybrid import AnyCanary
from kvref_adapters.vllm_cpu.engine import Engines, VllmEngine, VllmOfOwnProcess


class VllmNixl(VllmOfOwnProcess):
    """With NIXL, whose backend UCX sends from process to process."""

    name = "vllm-nixl"

    def _start(self, canary: AnyCanary, folder: Path, blocks: int) -> Engines:
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        engines = []
        for _ in ("prefill", "decode"):
            os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())  # read by the process of the engine
            engines.append(self._start_one(canary, folder, blocks, kv_transfer_config=transfer))
        return tuple(engines)

    def _sessions(self, canary: AnyCanary, engines: Engines) -> "PrefillDecodeEngine":
        return PrefillDecodeEngine(canary, self, *engines)


class PrefillDecodeEngine(VllmEngine):
    """`_engine` of the base class is the decode engine."""

    def __init__(self, canary: AnyCanary, adapter: VllmNixl, prefill: Any, decode: Any) -> None:
        super().__init__(canary, adapter, decode)
        self._prefill = VllmEngine(canary, adapter, prefill)

    def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Compute all prompts together, then decode all of them together."""
        sent = self._send(prompts)
        pairs = zip(prompts, sent, strict=True)
        requests = [super(PrefillDecodeEngine, self)._add(prompt, count, **received) for prompt, received in pairs]
        found = self._finish()
        return [list(found[request].outputs[0].token_ids) for request in requests]

    def _add(self, prompt: Sequence[int], count: int, **sampling: Any) -> str:
        (received,) = self._send([prompt])
        return super()._add(prompt, count, **sampling | received)

    def _send(self, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """Compute prompts in the prefill engine. Returns for each the arguments with which the decode engine receives it."""
        asked = {"extra_args": {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}}
        requests = [self._prefill._add(prompt, 1, **asked) for prompt in prompts]
        found = self._prefill._finish()
        answers = [found[request].kv_transfer_params for request in requests]
        return [{"extra_args": {"kv_transfer_params": answer}} if answer else {} for answer in answers]


def free_port() -> int:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
