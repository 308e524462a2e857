"""Adapter of the server of Modular MAX on a CPU: a paged cache with prefixes, for one canary."""

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from kvref.canary import Canary, sized
from kvref_adapters._shared.server_process import ServerAdapter

# read by the server, which inherits them
os.environ |= {"MAX_SERVE_DISABLE_TELEMETRY": "1", "MODULAR_TELEMETRY_ENABLED": "0"}


class MaxServe(ServerAdapter):
    """With prefix caching, in pages of 128 tokens. One canary, because the server compiles its graph for minutes."""

    name = "max-serve"
    version = version("max")
    language = "mojo, python"
    project = "max"
    starting = 600.0
    limits: ClassVar[Mapping[str, Any]] = {
        "engine": {
            "num_layers": 2, "num_kv_heads": 2, "num_query_heads": 4, "head_dim": 64, "context": 1024, "period": 48, "window": 0,
            "recalls": 0,
        }
    }  # fmt: skip

    def __init__(self) -> None:
        """Start the server, because compiling can take longer than the judge's limit per call."""
        super().__init__()
        canary = sized(**self.limits["engine"])
        with tempfile.TemporaryDirectory(prefix="canary") as folder:
            self.loaded(canary, Path(folder), canary.context)

    def command(self, canary: Canary, folder: Path, port: int) -> Sequence[str]:
        return [
            str(Path(sys.executable).with_name("max")), "serve", "--model-path", str(folder), "--devices", "cpu",
            "--host", "127.0.0.1", "--port", str(port), "--quantization-encoding", "float32",
            "--max-length", str(canary.context), "--max-batch-size", "8", "--enable-prefix-caching",
        ]  # fmt: skip
