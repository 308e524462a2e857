"""Adapter of `transformers serve`: whole texts, each computed anew, or all of them in the paged cache of continuous batching."""

import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from kvref.canary import Canary
from kvref_conformance.implementations.engines.serving import Serving

BLOCK, CONTEXTS = 32, 8  # tokens per block; number of whole contexts that the cache has room for
COMMAND = "from transformers.cli.transformers import main; main()"  # the code of the script `transformers`


class Serve(Serving):
    name = "transformers-serve"
    version = version("transformers")
    language = "python"
    project = "transformers"

    def command(self, canary: Canary, folder: Path, port: int) -> Sequence[str]:
        return [
            sys.executable,
            "-c",
            COMMAND,
            "serve",
            str(folder),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--device",
            "cpu",
        ]


class Continuous(Serve):
    name = "transformers-serve-continuous"

    def command(self, canary: Canary, folder: Path, port: int) -> Sequence[str]:
        """The command. It limits the size of the cache: the default is most of the memory of the machine."""
        blocks = -(-CONTEXTS * canary.context // BLOCK)
        sizes = ["--cb-block-size", str(BLOCK), "--cb-num-blocks", str(blocks), "--cb-max-batch-tokens", str(2 * canary.context)]
        return [*super().command(canary, folder, port), "--continuous-batching", *sizes]
