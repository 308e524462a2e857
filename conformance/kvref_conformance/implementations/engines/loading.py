"""What every engine needs here: a canary, written as files and loaded. It says tokens, so arrays hardly matter."""

import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kvref.canary import Canary, sized
from kvref_conformance.interface import Level
from kvref_conformance.outcome import NotOffered


class Loads(ABC):
    """An engine that makes its model of a canary's files. options: what a variant of it asks for beyond the defaults."""

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
            raise NotOffered("a cache that is given its size")
        canary = sized(**sizes)
        with tempfile.TemporaryDirectory(prefix="canary") as folder:
            return self.loaded(canary, Path(folder), cache_tokens)

    @abstractmethod
    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> Any:
        """The engine with this canary. folder: an empty one to write its files into, gone when this returns."""
