"""llama.cpp's server: slots, each of which begins with what it holds of a prompt already. This file is the command too."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import xllamacpp

from kvref.canary import Canary
from kvref_conformance.canary import gguf
from kvref_conformance.implementations.engines.llama_api import VERSION
from kvref_conformance.implementations.engines.serving import Serving
from kvref_conformance.outcome import NotOffered

SLOTS = 4


class Server(Serving):
    name = "llama.cpp-server"
    version = VERSION
    language = "c++"
    project = "llama.cpp"

    def command(self, canary: Canary, folder: Path, port: int) -> Sequence[str]:
        if any(canary.windows):
            raise NotOffered("windows, which llama.cpp has none of in a Llama")
        file = folder.with_name("canary.gguf")
        gguf.write(file, gguf.gguf(canary, "float32"))
        return [sys.executable, __file__, str(file), str(port), str(SLOTS * canary.context)]


def serve(file: str, port: int, tokens: int) -> None:
    """Until the process is ended. tokens: of all slots together."""
    asked = xllamacpp.CommonParams()
    asked.model.path, asked.port, asked.n_ctx, asked.n_parallel = file, port, tokens, SLOTS
    server = xllamacpp.Server(asked)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
