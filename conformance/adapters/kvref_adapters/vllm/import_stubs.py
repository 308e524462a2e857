"""Stand-ins for modules that vLLM imports but its block managers do not use: output grammars, and parsers of reasoning.

The real modules need the packages of a server. A request checks the first for a grammar; no request here has one. Import this
module before vLLM.
"""

import os
import sys
from types import ModuleType


class StructuredOutputRequest:
    @staticmethod
    def from_sampling_params(sampling_params: object) -> None:
        return None


def _install_stub(name: str, **attributes: object) -> None:
    module = ModuleType(name)
    module.__path__ = []
    vars(module).update(attributes)
    sys.modules.setdefault(name, module)


os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # otherwise it logs each reset
_install_stub("vllm.v1.structured_output")
_install_stub("vllm.v1.structured_output.request", StructuredOutputRequest=StructuredOutputRequest)
_install_stub("vllm.reasoning", ReasoningParserManager=object)
