"""Adapter of mlx-lm's own server: whole texts, with a prompt cache that keeps prefixes between requests."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx_lm

from kvref.canary import Canary
from kvref_conformance.implementations.engines.serving import Serving, write


class Server(Serving):
    name = "mlx-lm-server"
    version = f"{mlx_lm.__version__}, mlx {mx.__version__}"
    language = "python"
    project = "mlx-lm"

    def command(self, canary: Canary, folder: Path, port: int) -> Sequence[str]:
        return [sys.executable, "-m", "mlx_lm", "server", "--model", str(folder), "--port", str(port)]


class Drafted(Server):
    """With speculative decoding from a draft model."""

    name = "mlx-lm-server-draft"

    def command(self, canary: Canary, folder: Path, port: int) -> Sequence[str]:
        draft = folder.with_name("draft")
        write(_draft(canary), draft)
        return [*super().command(canary, folder, port), "--draft-model", str(draft)]


def _draft(canary: Canary) -> Canary:
    """A draft model that looks back one token too far and so is nearly always wrong; the canary itself if impossible."""
    if canary.recalls or any(canary.windows):
        return canary
    return replace(canary, offsets=(*canary.offsets[:-1], canary.offsets[-1] + 1))
