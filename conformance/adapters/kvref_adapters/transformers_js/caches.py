"""Adapters of transformers.js as programs that speak the protocol in a Node subprocess: a cache of one layer, and casts.

`transformers.js-dynamic` is a DynamicCache that is updated with the concatenation (`cat`) of old and new tokens; `truncate` is
Tensor's `slice`, `reorder` its `stack`. `transformers.js-casts` is Tensor's `to`, to float16 and back.
"""

import shutil
from pathlib import Path

from kvref_conformance.drivers.json_client import JsonClient

PROGRAM = Path(__file__).with_suffix(".cjs")


class _TransformersJsProgram(JsonClient):
    project = "transformers.js"
    family: str

    def __init__(self) -> None:
        node = shutil.which("node")
        if node is None:
            raise ImportError("transformers.js needs node, and the npm package @huggingface/transformers in NODE_PATH")
        super().__init__([node, str(PROGRAM), self.family], PROGRAM.parent)


class TransformersJsDynamic(_TransformersJsProgram):
    family = "contiguous"


class TransformersJsCasts(_TransformersJsProgram):
    family = "elements"
