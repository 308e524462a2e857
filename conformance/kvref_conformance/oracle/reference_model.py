"""The base class of models. A model predicts the reply to each request to one object, with lists and dicts as its state.

The methods of a model have the names of the family's operations and attributes, and return the expected reply (an `Expectation`).
The model changes its state only after the reply was found correct (`then`), so that a call that raises leaves it unchanged.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from kvref_conformance.oracle.expectations import Expectation, ExpectedError, Wrong, refuse

Look = tuple[str, dict[str, Any]]  # an operation that changes nothing, and its arguments


class ReferenceModel(ABC):
    """The model of one object.

    blamed: the clause that a wrong observation breaks, by (the last operation that changed something, the observation), or by the
    observation alone. blamed_after_refusal: the clause if the last call raised. last: the last operation that changed something,
    or "refused". moved: the saved data of all objects (see oracle.moved).
    """

    family: ClassVar[str]
    blamed: ClassVar[Mapping[Any, str]]
    blamed_after_refusal: ClassVar[str] = "LAW-01"

    def __init__(self) -> None:
        self.last = "new"
        self.moved: dict[bytes, Any] = {}

    def expect(self, name: str, args: dict[str, Any]) -> Expectation:
        """The expected reply to a call of the operation `name`."""
        found: Expectation = getattr(self, name)(**args)
        return found

    def declared(self, switch: Callable[[str], bool]) -> None:  # noqa: B027 - most models need no switch
        """Adapt the model to the limits that the implementation declares. switch: returns the value of a switch by its name."""

    @abstractmethod
    def looks(self) -> list[Look]:
        """Calls that read all observables, cheapest first."""

    def blame(self, seen: str) -> str:
        """The clause that an unexpected observation breaks."""
        if self.last == "refused":
            return self.blamed_after_refusal
        return self.blamed.get((self.last, seen)) or self.blamed.get(seen, "LAW-04")

    def did(self, name: str, change: Callable[[Any], None] = lambda ok: None) -> Callable[[Any], None]:
        """A function to call after `name` succeeded: it applies `change` to the model and sets `last`."""

        def then(ok: Any) -> None:
            change(ok)
            self.last = name

        return then

    def refuse(self, wrong: Wrong) -> ExpectedError:
        """The expectation of an error; see `expected.refuse`."""

        def refused() -> None:
            self.last = "refused"

        return refuse(wrong, refused)


class FunctionModel(ReferenceModel):
    """The model of a family without state: each reply depends on the arguments only.

    Its methods raise ValueError for arguments that they cannot judge.
    """

    blamed: ClassVar[Mapping[Any, str]] = {}

    def looks(self) -> list[Look]:
        return []
