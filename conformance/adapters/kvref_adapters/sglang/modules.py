"""SGLang's modules imported on a CPU, with stand-ins for what needs CUDA.

Stand-ins replace what the caches do not use on a CPU: Triton and TVM (kernels), pybase64 and PIL (images), the attention layer (a
type), 4-bit keys and values, metrics, and the parts of a request that are not about its cache: model configuration, sampling,
grammars, images, speculation, disaggregation. For packages that import every model and quantizer, `__init__` does not run.
"""

import importlib
import sys
from importlib.metadata import version
from typing import Any

import torch

from kvref_adapters._shared.import_stubs import install_stubs

VERSION = version("sglang")
DEVICE = "cpu"
ATTENTION_BACKEND = "torch_native"
ABSENT = (
    "triton", "tvm_ffi", "pybase64", "PIL",
    *(
        f"sglang.srt.{name}"
        for name in (
            "layers.radix_attention", "layers.quantization.kvfp4_tensor", "layers.moe", "observability.metrics_collector",
            "configs.model_config", "sampling", "constrained", "multimodal", "speculative", "disaggregation", "model_executor",
        )
    ),
)  # fmt: skip
BARE = ("sglang", *(f"sglang.srt.{name}" for name in ("configs", "layers.quantization", "layers.attention")))


def sglang_module(name: str) -> Any:
    """Import a module below `sglang.srt`.

    The first call publishes the server arguments for ATTENTION_BACKEND, all else default.
    """
    if "sglang" not in sys.modules:
        assert torch  # imported first, because SGLang checks whether Triton is available
        install_stubs(ABSENT, BARE)
        arguments = importlib.import_module("sglang.srt.server_args").ServerArgs
        context = importlib.import_module("sglang.srt.runtime_context").get_context()
        context.set_server_args(arguments(model_path="none", attention_backend=ATTENTION_BACKEND, device=DEVICE))
    return importlib.import_module(f"sglang.srt.{name}")
