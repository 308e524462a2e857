"""The part of llama.cpp's C API that sessions need, loaded with ctypes from the library in the wheel `xllamacpp`.

The wheel has no header, and the layout of structs differs between versions. Only fields whose offsets can be verified by their
default values are named here; the other bytes are passed back unchanged. `Context` verifies that llama.cpp read the named fields
as intended.
"""

import ctypes
import weakref
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xllamacpp.xllamacpp

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.outcome import CannotRun

VERSION = f"{version('xllamacpp')} (xllamacpp)"
# values of ggml's enum for the types of a cache
TYPES = {"f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}
BLOCK = 32  # numbers per block of a q type
MOST_SEQUENCES = 256  # LLAMA_MAX_SEQ
DONE, NO_SLOT, ABORTED = 0, 1, 2  # return values of `decode`


class ModelParams(ctypes.Structure):
    """The struct with its default values. It is longer than in any version; a function reads only its own part."""

    _fields_ = (("rest", ctypes.c_uint64 * 64),)


class ContextParams(ctypes.Structure):
    _fields_ = (
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("n_seq_max", ctypes.c_uint32),
        ("between", ctypes.c_uint32 * 9),
        ("flash_attn", ctypes.c_int32),  # -1: automatic, 0: off, 1: on
        ("rope_and_callback", ctypes.c_uint32 * 12),
        ("type_k", ctypes.c_int32),
        ("type_v", ctypes.c_int32),
        ("abort", ctypes.c_uint64 * 3),
        ("embeddings", ctypes.c_bool),
        ("offload_kqv", ctypes.c_bool),
        ("no_perf", ctypes.c_bool),
        ("op_offload", ctypes.c_bool),
        ("swa_full", ctypes.c_bool),
        ("kv_unified", ctypes.c_bool),
        ("rest", ctypes.c_uint64 * 64),
    )


DEFAULTS = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "flash_attn": -1, "type_k": 1, "type_v": 1,
    "embeddings": False, "offload_kqv": True, "no_perf": True, "op_offload": True, "swa_full": True, "kv_unified": False,
}  # fmt: skip


class LlamaBatch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


class BatchRow(NamedTuple):
    """One token of a batch. speaks: compute the logits after it."""

    token: int
    position: int
    sequence: int
    speaks: bool


_POINTER, _INT, _SIZE, _BYTES = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t, ctypes.c_char_p
_Log = ctypes.CFUNCTYPE(None, _INT, _BYTES, _POINTER)
_Abort = ctypes.CFUNCTYPE(ctypes.c_bool, _POINTER)
_SIGNATURES: dict[str, tuple[Any, ...]] = {  # return type and argument types by function
    "log_set": (None, _Log, _POINTER),
    "model_default_params": (ModelParams,),
    "context_default_params": (ContextParams,),
    "model_load_from_file": (_POINTER, _BYTES, ModelParams),
    "model_free": (None, _POINTER),
    "model_n_ctx_train": (_INT, _POINTER),
    "init_from_model": (_POINTER, _POINTER, ContextParams),
    "free": (None, _POINTER),
    "n_batch": (ctypes.c_uint32, _POINTER),
    "n_seq_max": (ctypes.c_uint32, _POINTER),
    "n_ctx_seq": (ctypes.c_uint32, _POINTER),
    "set_n_threads": (None, _POINTER, _INT, _INT),
    "set_abort_callback": (None, _POINTER, _Abort, _POINTER),
    "get_memory": (_POINTER, _POINTER),
    "decode": (_INT, _POINTER, LlamaBatch),
    "get_logits_ith": (ctypes.POINTER(ctypes.c_float), _POINTER, _INT),
    "memory_seq_rm": (ctypes.c_bool, _POINTER, _INT, _INT, _INT),
    "memory_seq_cp": (None, _POINTER, _INT, _INT, _INT, _INT),
    "memory_seq_add": (None, _POINTER, _INT, _INT, _INT, _INT),
    "state_seq_get_size": (_SIZE, _POINTER, _INT),
    "state_seq_get_data": (_SIZE, _POINTER, ctypes.c_char_p, _SIZE, _INT),
    "state_seq_set_data": (_SIZE, _POINTER, ctypes.c_char_p, _SIZE, _INT),
}


def _functions() -> dict[str, Any]:
    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    found = {}
    for name, (returns, *arguments) in _SIGNATURES.items():
        function = found[name] = getattr(library, f"llama_{name}")
        function.restype, function.argtypes = returns, arguments
    return found


_C = _functions()
_silent = _Log(lambda level, text, data: None)
_C["log_set"](_silent, None)


class LlamaModel:
    """A GGUF file loaded by llama.cpp. Raises CannotRun if llama.cpp rejects the file."""

    def __init__(self, file: Path) -> None:
        self.pointer = _C["model_load_from_file"](str(file).encode(), _C["model_default_params"]())
        if not self.pointer:
            raise CannotRun(f"llama.cpp cannot load {file.name}")
        weakref.finalize(self, _C["model_free"], self.pointer)
        self.context_length = int(_C["model_n_ctx_train"](self.pointer))


class LlamaContext:
    """A llama.cpp context: a cache of n_ctx cells and the computation over it. Methods have the names of llama.h.

    type_k, type_v: names of TYPES. flash_attn: -1 lets llama.cpp decide. kv_unified: one cache for all sequences; otherwise each
    of the n_seq_max sequences has n_ctx / n_seq_max cells of its own.
    """

    def __init__(
        self, model: LlamaModel, *, n_ctx: int, n_batch: int, n_seq_max: int, type_k: str, type_v: str, flash_attn: int,
        kv_unified: bool,
    ) -> None:  # fmt: skip
        params = _C["context_default_params"]()
        if {name: getattr(params, name) for name in DEFAULTS} != DEFAULTS:
            raise CannotRun(f"xllamacpp {version('xllamacpp')}: the layout of its llama_context_params is not known")
        asked = {"n_ctx": n_ctx, "n_batch": n_batch, "n_seq_max": n_seq_max, "flash_attn": flash_attn, "kv_unified": kv_unified}
        for name, value in asked.items():
            setattr(params, name, value)
        params.type_k, params.type_v = TYPES[type_k], TYPES[type_v]
        self.model = model  # keeps the model alive as long as the context
        self.pointer = _C["init_from_model"](model.pointer, params)
        if not self.pointer:
            raise CannotRun(f"llama.cpp cannot create a context of {asked} with a cache of {type_k} and {type_v}")
        weakref.finalize(self, _C["free"], self.pointer)
        self._memory = _C["get_memory"](self.pointer)
        self._most = _C["n_batch"](self.pointer)  # at most n_ctx
        _C["set_n_threads"](self.pointer, 1, 1)  # for a small canary, synchronizing threads costs more than they save
        self._expect_taken(n_ctx, n_seq_max, kv_unified)

    def decode(self, rows: Sequence[BatchRow]) -> int:
        """Call llama_decode. Returns DONE, NO_SLOT, ABORTED, or a negative number for an error."""
        if len(rows) > self._most:  # llama_decode would abort the process
            return NO_SLOT
        each = [ctypes.c_int32(row.sequence) for row in rows]
        sequences = [ctypes.pointer(one) for one in each]
        count, ints = len(rows), ctypes.c_int32 * len(rows)
        return int(
            _C["decode"](
                self.pointer,
                LlamaBatch(
                    n_tokens=count,
                    token=ints(*(row.token for row in rows)),
                    pos=ints(*(row.position for row in rows)),
                    n_seq_id=ints(*[1] * count),
                    seq_id=(ctypes.POINTER(ctypes.c_int32) * count)(*sequences),
                    logits=(ctypes.c_int8 * count)(*(row.speaks for row in rows)),
                ),
            )
        )

    def logits(self, row: int, vocabulary: int) -> NDArray:
        """Return the logits after a row of the last batch that has `speaks`. Valid until the next batch."""
        return np.ctypeslib.as_array(_C["get_logits_ith"](self.pointer, row), (vocabulary,))

    def decode_aborted(self, rows: Sequence[BatchRow]) -> int:
        """Like `decode`, with an abort callback that returns true at its first call."""
        stop = _Abort(lambda data: True)
        _C["set_abort_callback"](self.pointer, stop, None)
        try:
            return self.decode(rows)
        finally:
            _C["set_abort_callback"](self.pointer, _Abort(), None)

    def seq_rm(self, sequence: int, start: int, stop: int) -> None:
        """Remove positions [start, stop). stop: -1 for the end."""
        if not _C["memory_seq_rm"](self._memory, sequence, start, stop):
            raise RuntimeError(f"llama_memory_seq_rm({sequence}, {start}, {stop}) returned false")

    def seq_cp(self, source: int, target: int) -> None:
        _C["memory_seq_cp"](self._memory, source, target, -1, -1)

    def seq_add(self, sequence: int, start: int, delta: int) -> None:
        """Move all positions from `start` on; llama.cpp re-rotates their keys."""
        _C["memory_seq_add"](self._memory, sequence, start, -1, delta)

    def seq_get(self, sequence: int) -> bytes:
        data = ctypes.create_string_buffer(_C["state_seq_get_size"](self.pointer, sequence))
        written = _C["state_seq_get_data"](self.pointer, data, len(data), sequence)
        return data.raw[:written]

    def seq_set(self, sequence: int, data: bytes) -> bool:
        """Restore a saved sequence. Returns False if the cache has no room."""
        return bool(_C["state_seq_set_data"](self.pointer, data, len(data), sequence))

    def _expect_taken(self, n_ctx: int, n_seq_max: int, kv_unified: bool) -> None:
        """Raise CannotRun if llama.cpp did not read the fields as intended (their offsets are then wrong)."""
        got = _C["n_seq_max"](self.pointer), _C["n_ctx_seq"](self.pointer)
        if got[0] != n_seq_max or got[1] < (n_ctx if kv_unified else n_ctx // n_seq_max):
            raise CannotRun(f"llama.cpp: expected {n_seq_max} sequences in {n_ctx} cells, got {got[0]} of {got[1]} tokens each")
