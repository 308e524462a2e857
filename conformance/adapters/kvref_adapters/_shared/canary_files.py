"""Base class of the engine adapters: write a canary as files and load it with the engine. Arrays are not used, only tokens."""

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from kvref.canary import Canary
from kvref.canary.hybrid import CONTEXT, HYBRIDS, HybridCanary, engine_canary
from kvref_canary.files import huggingface as files
from kvref_canary.files.hybrid import make_hybrid_files
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import Level

Model = TypeVar("Model")
AnyKind = TypeVar("AnyKind", Canary, HybridCanary)


class EngineAdapter(ABC):
    """An adapter that loads a canary from files. options: arguments of the engine that a variant adds to the defaults."""

    name: str
    version: str
    language: str
    level: Level = "exact"
    formats: ClassVar[tuple[str, ...]] = ("float32",)
    options: ClassVar[dict[str, Any]] = {}

    def asarray(self, values: Any) -> Any:
        return values

    def to_numpy(self, array: Any) -> Any:
        return np.asarray(array)

    def engine(self, cache_tokens: int, **sizes: int) -> Any:
        if not isinstance(cache_tokens, int) or cache_tokens < 1:
            raise NotOffered("a cache size argument")
        canary = engine_canary(**sizes)
        with tempfile.TemporaryDirectory(prefix="canary") as folder:
            load = self.loaded if isinstance(canary, Canary) else self.loaded_hybrid
            return load(canary, Path(folder), cache_tokens)  # type: ignore[arg-type]

    @abstractmethod
    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> Any:
        """Return the engine with this canary. folder: an empty folder for the canary's files, deleted after this call returns."""

    def loaded_hybrid(self, canary: HybridCanary, folder: Path, cache_tokens: int) -> Any:
        """Like `loaded`, for a canary with recurrent state."""
        raise NotOffered("canaries with recurrent state")


def hybrid_limits(architecture: str) -> dict[str, Any]:
    """The limits of an engine that loads only this hybrid canary. The checks need a context of several periods of LFM2's 47."""
    only = {"recurrent": HYBRIDS.index(architecture) + 1, "recalls": 0, "window": 0}
    return {"engine": only | {"context": {"least": 256, "most": CONTEXT}}}


def write_canary(canary: Canary, folder: Path) -> None:
    """Write the canary in float32 as Hugging Face's folder."""
    files.write_folder(folder, files.make_files(canary, "mistral" if any(canary.windows) else "llama", "float32"))


def write_hybrid(canary: HybridCanary, folder: Path) -> None:
    """Write the hybrid canary in float32 as Hugging Face's folder."""
    files.write_folder(folder, make_hybrid_files(canary.architecture, "float32"))


def load_once(load: Callable[[AnyKind, Path], Model]) -> Callable[[AnyKind, Path], Model]:
    """Decorator of a function that loads a canary, for models without state: the model of a canary is loaded once and shared."""
    models: dict[AnyKind, Model] = {}

    @wraps(load)
    def load_or_reuse(canary: AnyKind, folder: Path) -> Model:
        if canary not in models:
            models[canary] = load(canary, folder)
        return models[canary]

    return load_or_reuse
