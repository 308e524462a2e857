"""Adapters of ik_llama.cpp's C API, loaded from the wheel `ik-llama-cpp-python`: each session is a sequence of one cache.

ik_llama.cpp is a fork of llama.cpp with kernels, formats and cache code of its own. The wheel's `_ctypes_api` declares the
structs. Functions that it does not declare are those of the fork's llama.h.
"""

import ctypes
import weakref
from collections import deque
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from ik_llama_cpp import _ctypes_api as api
from ik_llama_cpp._internals import IkModel

from kvref.canary import Canary
from kvref_adapters._shared.canary_files import EngineAdapter
from kvref_adapters._shared.llama_sessions import ABORTED, DONE, NO_SLOT, BatchRow, LlamaCppEngine
from kvref_canary.files import gguf
from kvref_conformance.exceptions import CannotRun, NotOffered
from kvref_conformance.implementation_api import NDArray

MOST_SEQUENCES = 64
MOST_CONTEXTS = 8  # that are not freed: a process can have 31

_POINTER, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t
_SIGNATURES: dict[str, tuple[Any, ...]] = {  # return type and argument types by function
    "set_n_threads": (None, _POINTER, ctypes.c_uint32, ctypes.c_uint32),
    "set_abort_callback": (None, _POINTER, api.ggml_abort_callback, _POINTER),
    "log_set": (None, ctypes.CFUNCTYPE(None, _INT, ctypes.c_char_p, _POINTER), _POINTER),
    "n_batch": (ctypes.c_uint32, _POINTER),
    "n_ctx": (ctypes.c_uint32, _POINTER),
    "kv_cache_seq_rm": (ctypes.c_bool, _POINTER, _INT, _INT, _INT),
    "kv_cache_seq_cp": (None, _POINTER, _INT, _INT, _INT, _INT),
    "kv_cache_seq_add": (None, _POINTER, _INT, _INT, _INT, _INT),
    "state_seq_get_size": (_SIZE, _POINTER, _INT, ctypes.c_uint32),
    "state_seq_get_data": (_SIZE, _POINTER, ctypes.c_char_p, _SIZE, _INT, ctypes.c_uint32),
    "state_seq_set_data": (_SIZE, _POINTER, ctypes.c_char_p, _SIZE, _INT, ctypes.c_uint32),
}


def _functions() -> dict[str, Any]:
    found = {}
    for name, (returns, *arguments) in _SIGNATURES.items():
        function = found[name] = getattr(api._lib, f"llama_{name}")
        function.restype, function.argtypes = returns, arguments
    return found


_C = _functions()
_silent = _SIGNATURES["log_set"][1](lambda level, text, data: None)
_C["log_set"](_silent, None)


class IkContext:
    """A context: a cache of n_ctx cells for all sequences. Methods have the names of llama.h.

    flags: fields of `llama_context_params`.
    """

    def __init__(self, model: IkModel, *, n_ctx: int, n_batch: int, n_seq_max: int, **flags: Any) -> None:
        params = api.llama_context_default_params()
        for name, value in {"n_ctx": n_ctx, "n_batch": n_batch, "n_ubatch": n_batch, "n_seq_max": n_seq_max, **flags}.items():
            setattr(params, name, value)
        self.model = model  # keeps the model alive as long as the context
        self.pointer = api.llama_init_from_model(model.model, params)
        if not self.pointer:
            raise CannotRun(f"ik_llama.cpp cannot create a context of {n_ctx} cells with {flags}")
        self._free = weakref.finalize(self, api.llama_free, self.pointer)
        self._most = _C["n_batch"](self.pointer)
        _C["set_n_threads"](self.pointer, 1, 1)
        if (got := _C["n_ctx"](self.pointer)) < n_ctx:
            raise CannotRun(f"ik_llama.cpp: expected {n_ctx} cells, got {got}")

    def free(self) -> None:
        """Free the context and its model. The context cannot be used afterwards."""
        self._free()
        self.model.close()

    def decode(self, rows: Sequence[BatchRow]) -> int:
        """Call llama_decode. Returns DONE, NO_SLOT, ABORTED, or a negative number for an error."""
        if len(rows) > self._most:
            return NO_SLOT
        batch = api.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for at, row in enumerate(rows):
            batch.token[at], batch.pos[at], batch.logits[at] = row.token, row.position, row.speaks
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, row.sequence
        try:
            return int(api.llama_decode(self.pointer, batch))
        finally:
            api.llama_batch_free(batch)

    def decode_aborted(self, rows: Sequence[BatchRow]) -> int:
        """Like `decode`, with an abort callback that returns true. ik_llama.cpp returns 0 whether it was called or not."""
        calls = []

        def stop(data: Any) -> bool:
            calls.append(data)
            return True

        self._stop = api.ggml_abort_callback(stop)  # kept: the context keeps its address
        _C["set_abort_callback"](self.pointer, self._stop, None)
        try:
            answer = self.decode(rows)
        finally:
            _C["set_abort_callback"](self.pointer, api.ggml_abort_callback(), None)
        return ABORTED if answer == DONE and calls else answer

    def logits(self, row: int, vocabulary: int) -> NDArray:
        return np.ctypeslib.as_array(api.llama_get_logits_ith(self.pointer, row), (vocabulary,))

    def seq_rm(self, sequence: int, start: int, stop: int) -> None:
        if not self.try_seq_rm(sequence, start, stop):
            raise RuntimeError(f"llama_kv_cache_seq_rm({sequence}, {start}, {stop}) returned false")

    def try_seq_rm(self, sequence: int, start: int, stop: int) -> bool:
        return bool(_C["kv_cache_seq_rm"](self.pointer, sequence, start, stop))

    def seq_cp(self, source: int, target: int) -> None:
        _C["kv_cache_seq_cp"](self.pointer, source, target, -1, -1)

    def seq_add(self, sequence: int, start: int, delta: int) -> None:
        _C["kv_cache_seq_add"](self.pointer, sequence, start, -1, delta)

    def seq_get(self, sequence: int) -> bytes:
        data = ctypes.create_string_buffer(_C["state_seq_get_size"](self.pointer, sequence, 0))
        written = _C["state_seq_get_data"](self.pointer, data, len(data), sequence, 0)
        return data.raw[:written]

    def seq_set(self, sequence: int, data: bytes) -> bool:
        return bool(_C["state_seq_set_data"](self.pointer, data, len(data), sequence, 0))


_contexts: deque[IkContext] = deque()  # that are not freed, the oldest first


class IkLlamaCpp(EngineAdapter):
    """The library's defaults: a cache of float16, with flash attention. options: arguments of `IkContext`."""

    name = "ik_llama.cpp"
    version = f"{version('ik-llama-cpp-python')} (ik-llama-cpp-python)"
    language = "c++"
    project = "ik_llama.cpp"

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> LlamaCppEngine:
        if any(canary.windows):
            raise NotOffered("windows: llama.cpp's Llama has none")
        while len(_contexts) >= MOST_CONTEXTS:  # of engines of earlier checks, which the judge may keep after a failure
            _contexts.popleft().free()
        sequences, batch = min(MOST_SEQUENCES, cache_tokens), max(canary.context, MOST_SEQUENCES)
        file = folder / "canary.gguf"
        gguf.write_gguf(file, gguf.gguf_file(canary, "float32"))
        context = IkContext(IkModel(str(file)), n_ctx=cache_tokens, n_batch=batch, n_seq_max=sequences, **self.options)
        _contexts.append(context)
        return LlamaCppEngine(canary, context, sequences)


class IkLlamaCppNoFlash(IkLlamaCpp):
    name = "ik_llama.cpp-no-flash"
    options: ClassVar[dict[str, Any]] = {"flash_attn": False}
