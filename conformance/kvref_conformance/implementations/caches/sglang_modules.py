"""SGLang's modules on a CPU, without what needs CUDA.

Stand-ins, none of which the caches use there: Triton and TVM (kernels), pybase64 and PIL (images), the attention layer (a type),
4-bit keys and values, metrics, and what a request holds beside its cache: model configuration, sampling, grammars, images,
speculation, disaggregation. Of packages that import every model and quantizer, the `__init__` does not run.
"""

import importlib
import sys
from importlib.metadata import version
from typing import Any

import torch

from kvref_conformance.implementations.caches.stand_ins import stand_in

VERSION = version("sglang")
DEVICE = "cpu"
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


def module(name: str) -> Any:
    """One below `sglang.srt`. The first publishes what a server with PyTorch's own attention, and no other options, would."""
    if "sglang" not in sys.modules:
        assert torch  # is to be there first: it asks whether there is Triton
        stand_in(ABSENT, BARE)
        arguments = importlib.import_module("sglang.srt.server_args").ServerArgs
        context = importlib.import_module("sglang.srt.runtime_context").get_context()
        context.set_server_args(arguments(model_path="none", attention_backend="torch_native", device=DEVICE))
    return importlib.import_module(f"sglang.srt.{name}")
