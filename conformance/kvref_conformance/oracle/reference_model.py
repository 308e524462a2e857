"""The base class of models. A model predicts the reply to each request to one object, with lists and dicts as its state.

The methods of a model have the names of the family's operations and attributes, and return the expected reply (an `Expectation`).
The model changes its state only after the reply was found correct (`then`), so that a call that raises leaves it unchanged.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from kvref_conformance.oracle.expectations import Errors, Expectation, ExpectedError, expect_error

ReadCall = tuple[str, dict[str, Any]]  # an operation that changes nothing, and its arguments


class TooManyStates(ValueError):
    """There are too many possible states to follow. A state machine then ends its call sequence."""


class ReferenceModel(ABC):
    """The model of one object.

    clause_by_observation: the clause that a wrong observation breaks, by (the last operation that changed something, the
    observation), or by the observation alone. clause_after_error: the clause if the last call raised. unchanged_by: the last call
    that must not change anything, if no call changed something after it. saved_states: the saved data of all objects (see
    oracle.saved_state).
    """

    family: ClassVar[str]
    clause_by_observation: ClassVar[Mapping[Any, str]]
    clause_after_error: ClassVar[str] = "LAW-01"

    def __init__(self) -> None:
        self.unchanged_by = ""
        self._last_change = "new"
        self._correct = set[str]()  # the observations that were correct since the last change
        self._observed = ""  # the observation that is being judged
        self.saved_states: dict[bytes, Any] = {}

    @property
    def last_change(self) -> str:
        """The operation that a wrong observation is attributed to: the last one that changed something, or "new".

        It is `unchanged_by`, for example "refused" after a call that raised, only if the observation was correct before that
        call. Otherwise the observation may have been wrong before.
        """
        return self.unchanged_by if self.unchanged_by and self._observed in self._correct else self._last_change

    def note_change(self, name: str) -> None:
        """Note that an operation changed something."""
        self.unchanged_by, self._last_change = "", name
        self._correct.clear()

    def note_unchanged(self, name: str) -> None:
        """Note a call that must not change anything: "refused" if it raised, or another name in `clause_by_observation`."""
        self.unchanged_by = name

    def note_correct(self) -> None:
        """Note that the reply to the call that was expected last was correct."""
        self._correct.add(self._observed)

    @property
    def must_be_read(self) -> bool:
        """Whether the model covers further calls only after the observables were read."""
        return False

    def expect(self, name: str, args: dict[str, Any]) -> Expectation:
        """The expected reply to a call of the operation `name`."""
        # Without arrays: attention over the same tokens with other queries is the same observation.
        self._observed = f"{name} {[value for value in args.values() if not isinstance(value, np.ndarray)]}"
        found: Expectation = getattr(self, name)(**args)
        return found

    def apply_limits(self, switch: Callable[[str], bool]) -> None:  # noqa: B027 - most models need no switch
        """Adapt the model to the limits that the implementation declares. switch: returns the value of a switch by its name."""

    @abstractmethod
    def observations(self) -> list[ReadCall]:
        """Calls that read all observables, cheapest first."""

    def clause_of(self, seen: str) -> str:
        """The clause that an unexpected observation breaks."""
        if self.last_change == "refused":
            return self.clause_after_error
        return self.clause_by_observation.get((self.last_change, seen)) or self.clause_by_observation.get(seen, "LAW-04")

    def on_success(self, name: str, change: Callable[[Any], None] = lambda ok: None) -> Callable[[Any], None]:
        """A function to call after `name` succeeded: it applies `change` to the model and sets `last_change`."""

        def then(ok: Any) -> None:
            change(ok)
            self.note_change(name)

        return then

    def expect_error(self, wrong: Errors) -> ExpectedError:
        """The expectation of an error; see `expectations.expect_error`."""

        def refused() -> None:
            self.note_unchanged("refused")

        return expect_error(wrong, refused)


class FunctionModel(ReferenceModel):
    """The model of a family without state: each reply depends on the arguments only.

    Its methods raise ValueError for arguments that they cannot judge.
    """

    clause_by_observation: ClassVar[Mapping[Any, str]] = {}

    def observations(self) -> list[ReadCall]:
        return []
