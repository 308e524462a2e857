"""What vLLM imports on the way to its block managers, and they do not use: output grammars, and parsers of reasoning.

Both would bring the packages of a server. A request asks the first whether it has a grammar; none of ours has. Import this
before vLLM.
"""

import os
import sys
from types import ModuleType


class StructuredOutputRequest:
    @staticmethod
    def from_sampling_params(sampling_params: object) -> None:
        return None


def _stand_in(name: str, **attributes: object) -> None:
    module = ModuleType(name)
    module.__path__ = []
    vars(module).update(attributes)
    sys.modules.setdefault(name, module)


os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it logs each reset
_stand_in("vllm.v1.structured_output")
_stand_in("vllm.v1.structured_output.request", StructuredOutputRequest=StructuredOutputRequest)
_stand_in("vllm.reasoning", ReasoningParserManager=object)
