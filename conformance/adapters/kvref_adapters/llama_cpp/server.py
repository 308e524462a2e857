"""Adapter of llama.cpp's server, whose slots reuse the common prefix of their last prompt.

Run as a program, this file is the server.
"""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import xllamacpp

from kvref.canary import Canary
from kvref_adapters._shared.server_process import ServerAdapter
from kvref_adapters.llama_cpp.engine import VERSION
from kvref_canary.files import gguf
from kvref_conformance.exceptions import NotOffered

SLOTS = 4


class LlamaCppServer(ServerAdapter):
    name = "llama.cpp-server"
    version = VERSION
    language = "c++"
    project = "llama.cpp"

    def command(self, canary: Canary, folder: Path, port: int) -> Sequence[str]:
        if any(canary.windows):
            raise NotOffered("windows: llama.cpp's Llama has none")
        file = folder.with_name("canary.gguf")
        gguf.write_gguf(file, gguf.gguf_file(canary, "float32"))
        return [sys.executable, __file__, str(file), str(port), str(SLOTS * canary.context)]


def serve(file: str, port: int, tokens: int) -> None:
    """Serve until the process is killed. tokens: the size of the cache of all slots together."""
    asked = xllamacpp.CommonParams()
    asked.model.path, asked.port, asked.n_ctx, asked.n_parallel = file, port, tokens, SLOTS
    server = xllamacpp.Server(asked)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
