"""vLLM's Triton kernels on a CPU. Import this module before vLLM.

vLLM asks its platform for capabilities that only GPUs have; those two functions are replaced.
"""

import os
from importlib.metadata import version
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # without this variable, vLLM does not import Triton on a machine without a GPU

import kvref_adapters._shared.triton_interpreter
import kvref_adapters.vllm.import_stubs  # noqa: F401 - both before vLLM

import torch  # isort: skip
from kvref_adapters._shared.torch_arrays import OneThreadTorch  # isort: skip
from vllm.platforms import current_platform  # isort: skip

torch.cuda.get_device_capability = lambda *args: (9, 0)
type(current_platform).has_device_capability = classmethod(lambda cls, *args: True)


class VllmTriton(OneThreadTorch):
    version = f"{version('vllm')}, triton {version('triton')}, interpreted"
    language = "triton"
    project = "vllm"


def blocks_of(tokens: Any, block: int, fill: float) -> Any:
    """Return tokens [n, heads, dim] in blocks of `block` tokens, filled up with `fill`: [blocks, block, heads, dim]."""
    blocks = -(-len(tokens) // block)
    page = torch.full((blocks * block, *tokens.shape[1:]), fill, dtype=tokens.dtype)
    page[: len(tokens)] = tokens
    return page.view(blocks, block, *tokens.shape[1:])
