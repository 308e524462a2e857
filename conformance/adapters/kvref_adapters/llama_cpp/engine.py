"""Adapters of llama.cpp's C API, loaded from the wheel `xllamacpp`: each session is a sequence of one cache.

The wheel has no header, and the layout of structs differs between versions. Only fields whose offsets can be verified by their
default values are named here; the other bytes are passed back unchanged. `LlamaContext` verifies that llama.cpp read the named
fields as intended.
"""

import ctypes
import gc
import weakref
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import xllamacpp.xllamacpp

from kvref.canary import Canary
from kvref.canary.hybrid import HybridCanary
from kvref_adapters._shared.canary_files import EngineAdapter, hybrid_limits, load_once
from kvref_adapters._shared.llama_sessions import NO_SLOT, BatchRow, LlamaCppEngine
from kvref_canary.files import gguf
from kvref_canary.files.hybrid_gguf import hybrid_gguf_file
from kvref_conformance.exceptions import CannotRun, NotOffered
from kvref_conformance.implementation_api import NDArray

VERSION = f"{version('xllamacpp')} (xllamacpp)"
# values of ggml's enum for the types of a cache
TYPES = {"f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}
BLOCK = 32  # numbers per block of a q type
MOST_SEQUENCES = 256  # LLAMA_MAX_SEQ


class ModelParams(ctypes.Structure):
    """The struct with its default values. It is longer than in any version; a function reads only its own part."""

    _fields_ = (("rest", ctypes.c_uint64 * 64),)


class ContextParams(ctypes.Structure):
    _fields_ = (
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("n_seq_max", ctypes.c_uint32),
        ("n_rs_seq", ctypes.c_uint32),
        ("between", ctypes.c_uint32 * 8),
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
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_rs_seq": 0, "flash_attn": -1, "type_k": 1, "type_v": 1,
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
    of the n_seq_max sequences has n_ctx / n_seq_max cells of its own. n_rs_seq: the number of recurrent states per sequence that
    llama.cpp keeps for rollbacks.
    """

    def __init__(
        self, model: LlamaModel, *, n_ctx: int, n_batch: int, n_seq_max: int, type_k: str, type_v: str, flash_attn: int,
        kv_unified: bool, n_rs_seq: int = 0,
    ) -> None:  # fmt: skip
        params = _C["context_default_params"]()
        if {name: getattr(params, name) for name in DEFAULTS} != DEFAULTS:
            raise CannotRun(f"xllamacpp {version('xllamacpp')}: the layout of its llama_context_params is not known")
        asked = {
            "n_ctx": n_ctx, "n_batch": n_batch, "n_seq_max": n_seq_max, "flash_attn": flash_attn, "kv_unified": kv_unified,
            "n_rs_seq": n_rs_seq,
        }  # fmt: skip
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
        if not self.try_seq_rm(sequence, start, stop):
            raise RuntimeError(f"llama_memory_seq_rm({sequence}, {start}, {stop}) returned false")

    def try_seq_rm(self, sequence: int, start: int, stop: int) -> bool:
        """Remove positions [start, stop), and return whether llama.cpp did: from a recurrent state it cannot always."""
        return bool(_C["memory_seq_rm"](self._memory, sequence, start, stop))

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


ROLLBACK = 8  # earlier states of a sequence that a variant keeps
LEAST = 64  # tokens per session: the cache has to accept cache_tokens in total, in sessions of at least this length


class LlamaCpp(EngineAdapter):
    """One cache of float16 for all sequences; llama.cpp decides about flash attention. options: arguments of `Context`."""

    name = "llama.cpp"
    version = VERSION
    language = "c++"
    project = "llama.cpp"
    options: ClassVar[dict[str, Any]] = {}

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "LlamaCppEngine":
        asked: dict[str, Any] = {"type_k": "f16", "type_v": "f16", "flash_attn": -1, "kv_unified": True} | self.options
        if any(canary.windows):
            raise NotOffered("windows: llama.cpp's Llama has none")
        if asked["type_k"].startswith("q") and canary.head_dim % BLOCK:
            raise NotOffered(f"a cache of {asked['type_k']} with head_dim {canary.head_dim}, which is not a multiple of {BLOCK}")
        sequences, cells = min(MOST_SEQUENCES, cache_tokens), cache_tokens  # llama.cpp aborts with fewer cells than sequences
        if not asked["kv_unified"]:
            sequences = min(MOST_SEQUENCES, -(-cache_tokens // LEAST))
            cells = sequences * canary.context
        batch = max(canary.context, MOST_SEQUENCES)
        context = LlamaContext(_model(canary, folder), n_ctx=cells, n_batch=batch, n_seq_max=sequences, **asked)
        return LlamaCppEngine(canary, context, sequences)


class LlamaCppSplit(LlamaCpp):
    """A separate part of the cache for each sequence."""

    name = "llama.cpp-split"
    options: ClassVar[dict[str, Any]] = {"kv_unified": False}


class LlamaCppNoFlash(LlamaCpp):
    name = "llama.cpp-no-flash"
    options: ClassVar[dict[str, Any]] = {"flash_attn": 0}


class LlamaCppQ8(LlamaCpp):
    name = "llama.cpp-q8"
    options: ClassVar[dict[str, Any]] = {"type_k": "q8_0", "type_v": "q8_0"}


class LlamaCppHybrid(LlamaCpp):
    """With recurrent state, one per sequence. options["n_rs_seq"]: how many earlier states are kept for rollbacks."""

    def loaded_hybrid(self, canary: HybridCanary, folder: Path, cache_tokens: int) -> "LlamaCppEngine":
        sequences = min(MOST_SEQUENCES, -(-cache_tokens // LEAST))  # each has n_rs_seq + 1 states, whether it is used or not
        asked: dict[str, Any] = {"type_k": "f16", "type_v": "f16", "flash_attn": -1, "kv_unified": True} | self.options
        batch = max(canary.context, MOST_SEQUENCES)
        gc.collect()  # frees the contexts of earlier engines, whose states would exceed the judge's limit of memory
        context = LlamaContext(_hybrid_model(canary, folder), n_ctx=cache_tokens, n_batch=batch, n_seq_max=sequences, **asked)
        return LlamaCppEngine(canary, context, sequences)


class LlamaCppLfm2(LlamaCppHybrid):
    name = "llama.cpp-lfm2"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("lfm2")


class LlamaCppMamba2(LlamaCppHybrid):
    name = "llama.cpp-mamba2"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("mamba2")


class LlamaCppFalconH1(LlamaCppHybrid):
    name = "llama.cpp-falcon-h1"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("falcon-h1")


class LlamaCppQwen35(LlamaCppHybrid):
    name = "llama.cpp-qwen3.5"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("qwen3.5")


class LlamaCppGraniteMoeHybrid(LlamaCppHybrid):
    name = "llama.cpp-granite-moe-hybrid"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("granite-moe-hybrid")


class LlamaCppNemotronH(LlamaCppHybrid):
    name = "llama.cpp-nemotron-h"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("nemotron-h")


class LlamaCppQwen3Next(LlamaCppHybrid):
    name = "llama.cpp-qwen3-next"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("qwen3-next")


class LlamaCppKimiLinear(LlamaCppHybrid):
    name = "llama.cpp-kimi-linear"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("kimi-linear")


class LlamaCppLfm2Rollback(LlamaCppLfm2):
    name = "llama.cpp-lfm2-rollback"
    options: ClassVar[dict[str, Any]] = {"n_rs_seq": ROLLBACK}


class LlamaCppQwen35Rollback(LlamaCppQwen35):
    name = "llama.cpp-qwen3.5-rollback"
    options: ClassVar[dict[str, Any]] = {"n_rs_seq": ROLLBACK}


@load_once
def _model(canary: Canary, folder: Path) -> LlamaModel:
    """The canary in float32. The cache belongs to a context, not to the model."""
    file = folder / "canary.gguf"
    gguf.write_gguf(file, gguf.gguf_file(canary, "float32"))
    return LlamaModel(file)


@load_once
def _hybrid_model(canary: HybridCanary, folder: Path) -> LlamaModel:
    """The hybrid canary in float32."""
    file = folder / "canary.gguf"
    gguf.write_gguf(file, hybrid_gguf_file(canary.architecture, "float32"))
    return LlamaModel(file)
