"""Models of saving and loading (MOVE): the saved bytes, and the content that loading them must restore."""

from abc import abstractmethod
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvref_conformance.oracle.expectations import AnyOf, Errors, Expectation, ExpectedError
from kvref_conformance.oracle.reference_model import ReferenceModel

# The clause that a wrong observation breaks, after a cache was saved or loaded, or loading raised.
CLAUSE_BY_OPERATION = {"save": "MOVE-04", "load": "MOVE-01", "load of nothing": "MOVE-07", "not loaded": "MOVE-03"}
OBSERVABLES = (
    "length", "read", "num_free_blocks", "block_table", "stats", "tier_of", "total_tokens", "stored_tokens", "num_bytes",
    "records",
)  # fmt: skip
CLAUSE_BY_OBSERVATION: dict[Any, str] = {
    (did, seen): clause for did, clause in CLAUSE_BY_OPERATION.items() for seen in OBSERVABLES
}


@dataclass(frozen=True)
class SavedState:
    """Saved data. shape: the properties that the loading object must have too. content: the state of the model.

    empty: whether it contains no tokens.
    """

    family: str
    shape: Any
    content: Any
    empty: bool


class SerializableModel(ReferenceModel):
    """A model of an object that can be saved and loaded.

    `saved_states` maps saved bytes to their content, for all objects of a trace.
    room_errors: the errors of an object without room, which it may also raise for data that is invalid.
    """

    room_errors: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def shape(self) -> Any: ...

    def expect_save(self, content: Any, empty: bool) -> Expectation:
        """The expected reply to a save of this content."""

        def note(data: Any) -> None:
            self.saved_states[data.tobytes()] = SavedState(self.family, self.shape(), content, empty)
            self.note_unchanged("save")

        def is_bytes(data: Any) -> bool:
            return isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.ndim == 1

        return AnyOf("MOVE-04", note, range_text="bytes, uint8 [n]", accepts=is_bytes)

    def expect_load(
        self, data: Any, wrong: Errors, change: Callable[[Any], None], room: Callable[[Any], Errors] = lambda content: []
    ) -> Expectation:
        """The expected reply to a load.

        change: sets the model to a content. room: the errors if there is no room for a content. wrong: other errors of the call.
        """
        found = self.saved_states.get(np.asarray(data).tobytes())

        def refused() -> None:
            self.note_unchanged("not loaded")

        if found is None:
            kinds = ("FileDamaged", "ConfigError", *self.room_errors, *(kind for kind, _ in wrong))
            return ExpectedError("MOVE-03", kinds=kinds, on_error=refused)
        if (found.family, found.shape) != (self.family, self.shape()):
            return ExpectedError(
                "MOVE-02", kinds=("ConfigError", *self.room_errors, *(kind for kind, _ in wrong)), on_error=refused
            )
        if wrong := wrong + room(found.content):
            return self.expect_error(wrong)
        did = self.on_success("load of nothing" if found.empty else "load", lambda ok: change(found.content))
        return Expectation("MOVE-01", did)


class WholeCacheModel(SerializableModel):
    """The model of a cache that is saved as a whole. content_attributes: the attributes of the model that are its content.

    largest: those of which a load keeps the larger one.
    """

    content_attributes: ClassVar[tuple[str, ...]]
    largest: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def is_empty(self) -> bool: ...

    def missing_room(self, content: dict[str, Any]) -> Errors:
        """The errors if there is no room for the content."""
        return []

    def save(self) -> Expectation:
        return self.expect_save({name: deepcopy(getattr(self, name)) for name in self.content_attributes}, self.is_empty())

    def load(self, data: Any) -> Expectation:
        def change(content: dict[str, Any]) -> None:
            for name, value in content.items():
                own = getattr(self, name)
                setattr(self, name, max(own, value) if name in self.largest else deepcopy(value))

        return self.expect_load(data, [], change, self.missing_room)
