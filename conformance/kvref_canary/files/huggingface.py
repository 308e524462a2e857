"""Writes a canary as a Hugging Face model folder that engines load, and reads it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

import kvref
from kvref.canary import BOS, EOS, UNKNOWN, Canary, Weights
from kvref.canary.dimensions import EPSILON
from kvref.canary.hybrid import HYBRIDS, AnyCanary, HybridCanary
from kvref.errors import ConfigError
from kvref_canary.files.architectures import ARCHITECTURES
from kvref_canary.files.tokenizer import tokenizer_files
from kvref_conformance.exceptions import CannotRun
from kvref_conformance.implementation_api import NDArray

SIZES_FILE = "canary.json"  # the file that marks the folder of a canary
FORMAT = 1
CANARY_FIELDS = tuple(field.name for field in dataclasses.fields(Canary) if field.init)
MAX_SIZE = 10_000  # maximum bytes of a SIZES file
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}  # safetensors' names

Files = dict[str, bytes]


def make_files(canary: Canary, architecture: str = "llama", dtype: str = "bfloat16") -> Files:
    """Return the files of a canary by name: equal bytes for equal sizes. architecture: one of ARCHITECTURES; dtype: of DTYPES.

    Raises ConfigError if the architecture does not support the windows or sizes.
    """
    config = ARCHITECTURES[architecture].config(canary) | {
        "vocab_size": canary.vocabulary,
        "hidden_size": canary.hidden_size,
        "intermediate_size": canary.intermediate_size,
        "num_hidden_layers": canary.num_layers,
        "num_attention_heads": canary.num_query_heads,
        "num_key_value_heads": canary.num_kv_heads,
        "head_dim": canary.head_dim,
        "max_position_embeddings": canary.context,
        "rms_norm_eps": EPSILON,
        "rope_theta": canary.theta,
        "rope_scaling": None,
        "attention_dropout": 0.0,
    }
    sizes = sizes_document(canary, architecture, dtype)
    return folder_files(canary, sizes, config, ARCHITECTURES[architecture].weights(canary))


def folder_files(words: Canary, sizes: dict[str, Any], config: dict[str, Any], tensors: Weights) -> Files:
    """Return the files of a folder by name.

    words: the canary whose words the tokenizer has. sizes: identifies the canary; its entry `dtype` is that of the weights.
    """
    special = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": UNKNOWN}
    general = {"initializer_range": 0.02, "use_cache": True, "torch_dtype": sizes["dtype"]}
    documents = {
        SIZES_FILE: sizes,
        "config.json": config | special | general,
        "generation_config.json": {**special, "do_sample": False},
        **tokenizer_files(words),
    }
    files = {name: (json.dumps(document, indent=1) + "\n").encode() for name, document in documents.items()}
    return files | {"model.safetensors": safetensors_file(tensors, sizes["dtype"])}


def sizes_document(canary: Canary, architecture: str, dtype: str) -> dict[str, Any]:
    """Return the document that identifies the canary."""
    return identity(architecture, dtype) | {name: getattr(canary, name) for name in CANARY_FIELDS}


def identity(architecture: str, dtype: str) -> dict[str, Any]:
    """Return what the documents of all canaries have in common."""
    return {"kvref_canary": FORMAT, "kvref": kvref.__version__, "architecture": architecture, "dtype": dtype}


def safetensors_file(tensors: Weights, dtype: str) -> bytes:
    """A safetensors file: the length of a header, the header, and the numbers, rounded to the nearest of the dtype.

    No library is used: NumPy has no bfloat16, and the bytes must not depend on installed versions.
    """
    raw = {name: to_little_endian(tensor, dtype).tobytes() for name, tensor in tensors.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, data in raw.items():
        header[name] = {"dtype": DTYPES[dtype], "shape": tensors[name].shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head + b"".join(raw.values())


def to_little_endian(tensor: NDArray, dtype: str) -> NDArray:
    """Return little-endian numbers; for bfloat16 their uint16 codes."""
    if dtype == "bfloat16":
        codes = kvref.reference.quantize(tensor, kvref.get_format("bfloat16")).codes
        return np.asarray(codes, "<u2")
    return tensor.astype(f"<{np.dtype(dtype).str[1:]}")


def write_folder(folder: Path, files: Files) -> None:
    """Write the files of a canary; only another canary is overwritten (`require_canary_folder`). Raises CannotRun and OSError."""
    require_canary_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def require_canary_folder(folder: Path) -> None:
    """Raises CannotRun if the path is neither a canary's folder nor empty: it must not be overwritten."""
    if folder.exists() and not folder.is_dir():
        raise CannotRun(f"{folder} is a file, expected a folder")
    if folder.is_dir() and any(folder.iterdir()):
        _read(folder, f"{folder} is not empty and is not a kvref canary: expected a new or empty folder, or an older canary")


def load(folder: Path) -> AnyCanary:
    """Return the canary of a folder. Raises CannotRun if the folder is not a canary's."""
    said = _read(folder, f"{folder} is not a canary: expected a folder with a {SIZES_FILE} (kvref canary make {folder})")
    if (architecture := said.get("architecture")) in HYBRIDS:
        return HybridCanary(architecture)
    try:
        fields = {name: said[name] for name in CANARY_FIELDS}
        offsets, windows = (_whole(fields[name]) for name in ("offsets", "windows"))
        if None in offsets or type(fields["recalls"]) is not bool or type(fields["theta"]) not in (int, float):
            raise TypeError
        return Canary(**fields | {"offsets": offsets, "windows": windows})
    except (KeyError, TypeError):
        raise CannotRun(f"{folder / SIZES_FILE}: expected the sizes of a canary: {', '.join(CANARY_FIELDS)}") from None
    except ConfigError as error:
        raise CannotRun(f"{folder / SIZES_FILE}: {error}") from None


def _whole(values: Any) -> tuple[Any, ...]:
    """Return a list of integers and None as a tuple. Raises TypeError for anything else."""
    if type(values) is not list or any(value is not None and type(value) is not int for value in values):
        raise TypeError
    return tuple(values)


def _read(folder: Path, otherwise: str) -> dict[str, Any]:
    """Return the document of SIZES. Raises CannotRun with the message `otherwise` if there is none."""
    try:
        with (folder / SIZES_FILE).open("rb") as file:
            said = json.loads(file.read(MAX_SIZE))
    except (OSError, ValueError, RecursionError):
        raise CannotRun(otherwise) from None
    if not isinstance(said, dict) or said.get("kvref_canary") != FORMAT:
        raise CannotRun(otherwise)
    return said
