"""A canary as one GGUF file, for llama.cpp. The format is a header, keys, and numbers, and is written without a library.

llama.cpp rotates neighboring numbers of a head as a pair, where others rotate i with i + head_dim / 2. It expects the rows of q
and k in that order. It has no word tokenizer. Its T5 tokenizer splits a text into pieces of the vocabulary; here each is a word.
"""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from kvref.canary import BOS, EOS, UNKNOWN, Canary, weights
from kvref.canary.dimensions import EPSILON
from kvref.errors import ConfigError
from kvref_canary.files.huggingface import SIZES_FILE, sizes_document, to_little_endian
from kvref_canary.files.tokenizer import CHAT_TEMPLATE
from kvref_canary.files.vocabulary import SPECIAL_WORDS, vocabulary
from kvref_conformance.exceptions import CannotRun
from kvref_conformance.implementation_api import NDArray

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
UINT32, FLOAT32, BOOL, STRING, ARRAY, INT32 = 4, 6, 7, 8, 9, 5  # of a key's value
TENSOR_TYPES = {"float32": 0, "float16": 1, "bfloat16": 30}
FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32}
NORMAL, UNKNOWN_TOKEN, CONTROL = 1, 2, 3  # of a token
HEADER_BYTES = 1000  # bytes that contain the first keys
Key = tuple[int, Any]  # type and value; the value of an array is (type of its elements, elements)
SIZES_KEY = f"kvref.{SIZES_FILE}"  # the key that marks the file of a canary
TENSOR_NAMES = {
    "model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm", "model.layers": "blk",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def gguf_file(canary: Canary, dtype: str = "bfloat16") -> bytes:
    """Return the file: equal bytes for equal sizes. llama.cpp expects float32 norms. Raises ConfigError for windows."""
    if any(canary.windows):
        raise ConfigError(f"--gguf: expected no windows, because llama.cpp has none in a Llama, got {canary.windows}")
    tensors = {_tensor_name(name): _reorder_rows(canary, name, tensor) for name, tensor in weights(canary).items()}
    wide = {name for name, tensor in tensors.items() if tensor.ndim > 1}
    return encode_gguf(_metadata(canary, dtype), tensors, dtype, wide)


def encode_gguf(keys: dict[str, Key], tensors: dict[str, NDArray], dtype: str, wide: set[str]) -> bytes:
    """Return a file. wide: the names of the tensors that are stored in dtype; the others are float32."""
    head, data = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(keys))], list[bytes]()
    head += [_encode_string(name) + struct.pack("<I", kind) + _encode_value(kind, value) for name, (kind, value) in keys.items()]
    start = 0
    for name, tensor in tensors.items():
        kept = dtype if name in wide else "float32"
        raw = to_little_endian(tensor, kept).tobytes()
        axes = tensor.shape[::-1]  # the contiguous axis first
        head.append(_encode_string(name) + struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, TENSOR_TYPES[kept], start))
        data.append(_pad(raw))
        start += len(data[-1])
    return _pad(b"".join(head)) + b"".join(data)


def write_gguf(file: Path, data: bytes) -> None:
    """Write the file; only a canary is overwritten (`require_canary_gguf`). Raises CannotRun and OSError."""
    require_canary_gguf(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)


def require_canary_gguf(file: Path) -> None:
    """Raises CannotRun if the path exists and is not a canary's file: it must not be overwritten."""
    if file.is_dir():
        raise CannotRun(f"--gguf: {file} is a folder, expected a file")
    if file.exists():
        with file.open("rb") as there:
            if SIZES_KEY.encode() not in there.read(HEADER_BYTES):
                raise CannotRun(f"--gguf: {file} exists and is not a kvref canary: expected another name")


def _metadata(canary: Canary, dtype: str) -> dict[str, Key]:
    own = {
        "vocab_size": (UINT32, canary.vocabulary),
        "context_length": (UINT32, canary.context),
        "embedding_length": (UINT32, canary.hidden_size),
        "block_count": (UINT32, canary.num_layers),
        "feed_forward_length": (UINT32, canary.intermediate_size),
        "attention.head_count": (UINT32, canary.num_query_heads),
        "attention.head_count_kv": (UINT32, canary.num_kv_heads),
        "attention.key_length": (UINT32, canary.head_dim),
        "attention.value_length": (UINT32, canary.head_dim),
        "attention.layer_norm_rms_epsilon": (FLOAT32, EPSILON),
        "rope.dimension_count": (UINT32, canary.head_dim),
        "rope.freq_base": (FLOAT32, canary.theta),
    }
    general = general_keys("llama", sizes_document(canary, "llama", dtype))
    return general | {f"llama.{name}": key for name, key in own.items()} | tokenizer_keys(canary)


def general_keys(architecture: str, sizes: dict[str, Any]) -> dict[str, Key]:
    """Return the first keys. architecture: llama.cpp's name. sizes: identifies the canary."""
    return {
        "general.architecture": (STRING, architecture),
        SIZES_KEY: (STRING, json.dumps(sizes)),
        "general.name": (STRING, "kvref canary"),
        "general.file_type": (UINT32, FILE_TYPES[sizes["dtype"]]),
    }


def tokenizer_keys(canary: Canary) -> dict[str, Key]:
    return {
        "tokenizer.ggml.model": (STRING, "t5"),
        "tokenizer.ggml.pre": (STRING, "default"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, _token_pieces(canary))),
        "tokenizer.ggml.scores": (ARRAY, (FLOAT32, [0.0] * canary.vocabulary)),
        "tokenizer.ggml.token_type": (ARRAY, (INT32, [_token_kind(token) for token in range(canary.vocabulary)])),
        "tokenizer.ggml.bos_token_id": (UINT32, BOS),
        "tokenizer.ggml.eos_token_id": (UINT32, EOS),
        "tokenizer.ggml.unknown_token_id": (UINT32, UNKNOWN),
        "tokenizer.ggml.padding_token_id": (UINT32, UNKNOWN),
        "tokenizer.ggml.add_bos_token": (BOOL, True),
        "tokenizer.ggml.add_eos_token": (BOOL, False),
        "tokenizer.ggml.add_space_prefix": (BOOL, True),
        "tokenizer.ggml.remove_extra_whitespaces": (BOOL, True),
        "tokenizer.chat_template": (STRING, CHAT_TEMPLATE),
    }


def _token_pieces(canary: Canary) -> list[str]:
    """Return the words as pieces: each word except the special ones starts with a space."""
    return [
        word if token in SPECIAL_WORDS else f"\N{LOWER ONE EIGHTH BLOCK}{word}" for token, word in enumerate(vocabulary(canary))
    ]


def _token_kind(token: int) -> int:
    return {UNKNOWN: UNKNOWN_TOKEN, BOS: CONTROL, EOS: CONTROL}.get(token, NORMAL)


def _tensor_name(name: str) -> str:
    for theirs, llama in TENSOR_NAMES.items():
        name = name.replace(theirs, llama)
    return name


def _reorder_rows(canary: Canary, name: str, tensor: NDArray) -> NDArray:
    """Return the rows of q and k in the rotation order of llama.cpp: `i` and `i + head_dim / 2` are adjacent."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    halves = tensor.reshape(-1, 2, canary.head_dim // 2, canary.hidden_size)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)


def _encode_value(kind: int, value: Any) -> bytes:
    if kind == ARRAY:
        each, values = value
        return struct.pack("<IQ", each, len(values)) + b"".join(_encode_value(each, one) for one in values)
    return (
        _encode_string(value)
        if kind == STRING
        else struct.pack({UINT32: "<I", INT32: "<i", FLOAT32: "<f", BOOL: "<?"}[kind], value)
    )


def _encode_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _pad(raw: bytes) -> bytes:
    return raw + b"\0" * (-len(raw) % ALIGNMENT)
