"""`transformers serve`: whole texts, each computed anew, or all of them in the paged cache of continuous batching."""

import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from kvref.canary import Canary
from kvref_conformance.implementations.engines.serving import Serving

COMMAND = "from transformers.cli.transformers import main; main()"  # what `transformers` runs


class Serve(Serving):
    name = "transformers-serve"
    version = version("transformers")
    language = "python"

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
        return [*super().command(canary, folder, port), "--continuous-batching"]
