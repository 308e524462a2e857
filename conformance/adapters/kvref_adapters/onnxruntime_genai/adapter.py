"""Adapter of ONNX Runtime's generate API: each session is a Generator with a cache of its own, which can be rewound."""

import contextlib
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai
from onnxruntime_genai.models import builder

from kvref.canary import Canary
from kvref.errors import CapacityExceeded, PositionOutOfRange, SequenceNotFound, TokenOutOfRange, in_range
from kvref_adapters._shared.canary_files import EngineAdapter, load_once, write_canary


class OnnxRuntimeGenAI(EngineAdapter):
    name = "onnxruntime-genai"
    version = onnxruntime_genai.__version__
    language = "c++"
    project = "onnxruntime-genai"

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "OnnxRuntimeGenAIEngine":
        return OnnxRuntimeGenAIEngine(canary, _model(canary, folder))


class OnnxRuntimeGenAIEngine:
    def __init__(self, canary: Canary, model: Any) -> None:
        self._canary, self._model = canary, model
        self._generators: dict[int, Any] = {}
        self._opened = 0

    def open(self) -> int:
        params = onnxruntime_genai.GeneratorParams(self._model)
        params.set_search_options(max_length=self._canary.context, do_sample=False)
        session, self._opened = self._opened, self._opened + 1
        self._generators[session] = onnxruntime_genai.Generator(self._model, params)
        return session

    def close(self, session: int) -> None:
        self._known(session)
        del self._generators[session]

    def length(self, session: int) -> int:
        return int(self._known(session).token_count())

    def extend(self, session: int, tokens: Sequence[int]) -> None:
        generator = self._known(session)
        given = [in_range(token, self._canary.vocabulary, TokenOutOfRange, "token") for token in tokens]
        # the library raises RuntimeError for this, as for all other errors
        if self.length(session) + len(given) > self._canary.context:
            raise CapacityExceeded(f"tokens: expected at most {self._canary.context}, got {self.length(session) + len(given)}")
        if given:
            generator.append_tokens(np.array(given, np.int32))

    def generate(self, session: int, count: int) -> list[int]:
        """Generate token by token: each call of the library generates one."""
        generator, said = self._speaking(session), list[int]()
        for _ in range(in_range(count, None, PositionOutOfRange, "count")):
            if generator.is_done():
                break
            generator.generate_next_token()
            said.append(int(generator.get_next_tokens()[0]))
        return said

    def step(self, sessions: Sequence[int]) -> list[int]:
        """Generate in one session after another: the library does not batch Generators."""
        if any(self._speaking(session).is_done() for session in sessions):
            raise CapacityExceeded(f"sessions: expected fewer than {self._canary.context} tokens in each")
        return [token for session in sessions for token in self.generate(session, 1)]

    def truncate(self, session: int, length: int) -> None:
        generator = self._known(session)
        generator.rewind_to(in_range(length, self.length(session) + 1, PositionOutOfRange, "length"))

    def _speaking(self, session: int) -> Any:
        if not self.length(session):
            raise PositionOutOfRange(f"session {session}: expected at least one token, got none")
        return self._known(session)

    def _known(self, session: int) -> Any:
        if session not in self._generators:
            raise SequenceNotFound(f"unknown session {session!r} (never opened, or already closed)")
        return self._generators[session]


@load_once
def _model(canary: Canary, folder: Path) -> Any:
    """The canary in float32, built by onnxruntime_genai's own model builder."""
    write_canary(canary, folder)
    with tempfile.TemporaryDirectory(prefix="canary-onnx") as built:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            options = ("", str(folder), built, "fp32", "cpu", built)
            builder.create_model(*options, **builder.parse_extra_options(*options, []))
        return onnxruntime_genai.Model(built)
