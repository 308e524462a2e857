"""Base class of the engine adapters: write a canary as files and load it with the engine. Arrays are not used, only tokens."""

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from kvref.canary import Canary, sized
from kvref_canary.files import huggingface as files
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import Level

Model = TypeVar("Model")


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
        canary = sized(**sizes)
        with tempfile.TemporaryDirectory(prefix="canary") as folder:
            return self.loaded(canary, Path(folder), cache_tokens)

    @abstractmethod
    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> Any:
        """Return the engine with this canary. folder: an empty folder for the canary's files, deleted after this call returns."""


def write_canary(canary: Canary, folder: Path) -> None:
    """Write the canary in float32 as Hugging Face's folder."""
    files.write_folder(folder, files.make_files(canary, "mistral" if any(canary.windows) else "llama", "float32"))


def load_once(load: Callable[[Canary, Path], Model]) -> Callable[[Canary, Path], Model]:
    """Decorator of a function that loads a canary, for models without state: the model of a canary is loaded once and shared."""
    models: dict[Canary, Model] = {}

    @wraps(load)
    def load_or_reuse(canary: Canary, folder: Path) -> Model:
        if canary not in models:
            models[canary] = load(canary, folder)
        return models[canary]

    return load_or_reuse
