"""What a model knows of what was saved: the bytes, and what they are of (MOVE)."""

from abc import abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvref_conformance.oracle.expected import Choice, Expected, Refused, Wrong
from kvref_conformance.oracle.model import Model

# Whose demand it is what is seen, once a cache was saved or loaded, or refused to be.
DID = {"save": "MOVE-04", "load": "MOVE-01", "load of nothing": "MOVE-07", "not loaded": "MOVE-03"}
SEEN = (
    "length", "read", "num_free_blocks", "block_table", "stats", "tier_of", "total_tokens", "stored_tokens", "num_bytes",
    "records",
)  # fmt: skip
BLAMED: dict[Any, str] = {(did, seen): clause for did, clause in DID.items() for seen in SEEN}


@dataclass(frozen=True)
class Moved:
    """shape: what another has to have in common with it. content: the model's own. empty: whether there are no tokens."""

    family: str
    shape: Any
    content: Any
    empty: bool


class Movable(Model):
    """`moved`, by the bytes, is one for all objects of a conversation.

    no_room: what is raised where there is none, which may be so of what is refused for more than that.
    """

    no_room: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def shape(self) -> Any: ...

    def saving(self, content: Any, empty: bool) -> Expected:
        def note(data: Any) -> None:
            self.moved[data.tobytes()] = Moved(self.family, self.shape(), content, empty)

        def is_bytes(data: Any) -> bool:
            return isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 1

        return Choice("MOVE-04", self.did("save", note), says="bytes, uint8 [n]", accepts=is_bytes)

    def loading(
        self, data: Any, wrong: Wrong, change: Callable[[Any], None], room: Callable[[Any], Wrong] = lambda content: []
    ) -> Expected:
        """change: to a content. room: what there is none for. wrong: with the call, whatever is loaded."""
        found, refused = self.moved.get(np.asarray(data).tobytes()), self.did("not loaded")
        if found is None:
            kinds = ("FileDamaged", "ConfigError", *self.no_room, *(kind for kind, _ in wrong))
            return Refused("MOVE-03", kinds=kinds, refused=lambda: refused(None))
        if (found.family, found.shape) != (self.family, self.shape()):
            return Refused(
                "MOVE-02", kinds=("ConfigError", *self.no_room, *(kind for kind, _ in wrong)), refused=lambda: refused(None)
            )
        if wrong := wrong + room(found.content):
            return self.refuse(wrong)
        did = self.did("load of nothing" if found.empty else "load", lambda ok: change(found.content))
        return Expected("MOVE-01", did)


class MovedWhole(Movable):
    """Of a cache that is saved as a whole. held: the attributes that say what it holds."""

    held: ClassVar[tuple[str, ...]]

    @abstractmethod
    def is_empty(self) -> bool: ...

    def lacks(self, content: dict[str, Any]) -> Wrong:
        """What there is no room for."""
        return []

    def save(self) -> Expected:
        return self.saving({name: deepcopy(getattr(self, name)) for name in self.held}, self.is_empty())

    def load(self, data: Any) -> Expected:
        def change(content: dict[str, Any]) -> None:
            for name, value in content.items():
                setattr(self, name, deepcopy(value))

        return self.loading(data, [], change, self.lacks)
