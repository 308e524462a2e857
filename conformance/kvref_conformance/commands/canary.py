"""`kvref canary make`: writes a canary as files, and prints a prompt to try it by hand."""

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from kvref.canary import BOS, FIRST_WORD, Canary, Oracle
from kvref.canary.dimensions import KEY_ERRORS, ROUNDOFF
from kvref.canary.hybrid import CONTEXT, HYBRIDS, WORDS, continued_text, prompt_length
from kvref.errors import ConfigError
from kvref_canary.files import gguf, huggingface, vocabulary
from kvref_canary.files.hybrid import make_hybrid_files
from kvref_canary.files.hybrid_gguf import hybrid_gguf_file
from kvref_conformance.exceptions import CannotRun

RECALL_SIZES: dict[str, Any] = {"offsets": (1,), "theta": 1e6, "head_dim": 128}  # defaults of a canary with --recalls
MAX_SHOWN_TOKENS = 12  # number of words of the continuation


def make_canary(options: argparse.Namespace) -> int:
    if options.architecture in HYBRIDS:
        return _make_hybrid(options)
    into, single = Path(options.folder), Path(options.gguf) if options.gguf else None
    try:
        canary = Canary(**(RECALL_SIZES if options.recalls else {}) | _sizes_of(options))
        files = huggingface.make_files(canary, options.architecture, options.dtype)
        data = gguf.gguf_file(canary, options.dtype) if single else b""
    except ConfigError as error:
        raise CannotRun(str(error)) from None
    _write(into, files, single, data, _describe_canary(canary, options), _example_lines(canary, options.dtype))
    return 0


def _make_hybrid(options: argparse.Namespace) -> int:
    """Writes a hybrid canary. Raises CannotRun for options that set sizes, which are fixed, and if there is no such GGUF file."""
    into, single = Path(options.folder), Path(options.gguf) if options.gguf else None
    architecture = options.architecture
    if sizes := _sizes_of(options):
        raise CannotRun(f"--architecture {architecture}: its sizes are fixed, expected no option for {', '.join(sizes)}")
    try:
        files = make_hybrid_files(architecture, options.dtype)
        data = hybrid_gguf_file(architecture, options.dtype) if single else b""
    except ConfigError as error:
        raise CannotRun(str(error)) from None
    text = continued_text(architecture, 0, prompt_length(architecture) + MAX_SHOWN_TOKENS)
    prompt, expected = (vocabulary.to_text(WORDS, part) for part in (text[:-MAX_SHOWN_TOKENS], text[-MAX_SHOWN_TOKENS:]))
    head = f"{architecture} in {options.dtype}; words: {WORDS.words}; context: {CONTEXT}"
    _write(into, files, single, data, [head], [f"prompt: {prompt}", f"expected: {expected} ..."])
    return 0


def _write(into: Path, files: huggingface.Files, single: Path | None, data: bytes, before: list[str], after: list[str]) -> None:
    """Write the folder and the single file, and print their sizes between other lines. Raises CannotRun and OSError."""
    if single:
        gguf.require_canary_gguf(single)
    huggingface.write_folder(into, files)
    if single:
        gguf.write_gguf(single, data)
    sizes = [f"{into}: {sum(map(len, files.values())) / 1e6:.1f} MB"]
    sizes += [f"{single}: {len(data) / 1e6:.1f} MB"] if single else []
    console = Console(highlight=False)
    for line in (*before, *sizes, *after):
        console.print(Text(line), soft_wrap=True)


def _sizes_of(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a Canary that the options set."""
    asked = {
        "offsets": _parse_numbers("--offsets", options.offsets), "recalls": options.recalls, "context": options.context,
        "num_kv_heads": options.kv_heads, "num_query_heads": options.query_heads, "head_dim": options.head_dim,
        "theta": options.theta, "windows": _parse_numbers("--windows", options.windows, "none"),
        "intermediate_size": options.intermediate, "num_pairs": options.pairs,
    }  # fmt: skip
    return {name: value for name, value in asked.items() if value not in (None, False)}


def _parse_numbers(option: str, said: str | None, none: str | None = None) -> tuple[int | None, ...] | None:
    """The numbers of a comma-separated list. none: the word that stands for None."""
    if said is None:
        return None
    parts = [part.strip() for part in said.split(",")]
    if not all(re.fullmatch("[0-9]{1,9}", part) or part == none for part in parts):
        raise CannotRun(f"{option}: expected numbers{f' or {none}' if none else ''} separated by commas, got {said!r}")
    return tuple(None if part == none else int(part) for part in parts)


def _describe_canary(canary: Canary, options: argparse.Namespace) -> list[str]:
    """The sizes, and the cache formats that must not change any token."""
    seen = "" if not any(canary.windows) else f", windows {', '.join(str(each or 'none') for each in canary.windows)}"
    layers = f"offsets {', '.join(map(str, canary.offsets))}{' and an induction head' if canary.recalls else ''}{seen}"
    must = [format for format in KEY_ERRORS if canary.survives(format, options.dtype)]
    measured = [format for format in KEY_ERRORS if format not in must]
    return [
        f"{options.architecture} in {options.dtype}; layers: {canary.num_layers} ({layers}); words: {canary.words}; "
        f"query heads: {canary.num_query_heads}, kv heads: {canary.num_kv_heads}, head_dim: {canary.head_dim}; "
        f"hidden size: {canary.hidden_size}; theta: {canary.theta:g}; context: {canary.context}",
        f"period: {canary.period} tokens" if not canary.recalls else "period: none (induction head)",
        f"cache formats that must not change any token: {', '.join(must) or 'none'}",
        f"cache formats that may change tokens: {', '.join(measured) or 'none'}",
    ]


def _example_lines(canary: Canary, dtype: str) -> list[str]:
    """A prompt as text and its greedy continuation, to try an engine by hand."""
    rng = np.random.default_rng(0)
    if canary.recalls:  # different words, then word `first` again, at which no layer looks back past position 0
        first = 1 + len(canary.offsets) + sum(canary.offsets)
        told = [BOS, *(FIRST_WORD + rng.permutation(canary.words)[: first + MAX_SHOWN_TOKENS]).tolist()]
        told.append(told[first])
    else:
        told = [BOS, *(FIRST_WORD + rng.integers(canary.words, size=canary.period)).tolist()]
    oracle = Oracle(canary, ROUNDOFF[dtype])
    says = oracle.extend(told)[-1:]
    while len(says) < MAX_SHOWN_TOKENS and says[-1] is not None and oracle.length < canary.context:
        says += oracle.extend([says[-1]])
    said = [token for token in says if token is not None]
    return [f"prompt: {vocabulary.to_text(canary, told[1:])}", f"expected: {vocabulary.to_text(canary, said)} ..."]
