"""A model of one object: what it must answer to each request, in lists and dicts.

A model's methods are named like the operations of its family, attributes included, and return what the reply must be. It takes
note of a change only once the reply was right (`then`), so that a refused call leaves it as it was.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from kvref_conformance.oracle.expected import Expected, Refused, Wrong, refuse

Look = tuple[str, dict[str, Any]]  # an operation that only looks, and its arguments


class Model(ABC):
    family: ClassVar[str]
    # Whose clause an observation breaks: by (the last operation that changed something, the observation), or the observation.
    blamed: ClassVar[Mapping[Any, str]]
    blamed_after_refusal: ClassVar[str] = "LAW-01"

    def __init__(self) -> None:
        self.last = "new"
        self.moved: dict[bytes, Any] = {}  # what was saved, here and elsewhere (see oracle.moved)

    def expect(self, name: str, args: dict[str, Any]) -> Expected:
        found: Expected = getattr(self, name)(**args)
        return found

    def declared(self, switch: Callable[[str], bool]) -> None:  # noqa: B027 - most have nothing to ask
        """What the implementation says of itself in its limits: a function of the name of a switch."""

    @abstractmethod
    def looks(self) -> list[Look]:
        """Everything there is to see, cheapest first."""

    def blame(self, seen: str) -> str:
        """The clause that an unexpected observation breaks."""
        if self.last == "refused":
            return self.blamed_after_refusal
        return self.blamed.get((self.last, seen)) or self.blamed.get(seen, "LAW-04")

    def did(self, name: str, change: Callable[[Any], None] = lambda ok: None) -> Callable[[Any], None]:
        """What to do once `name` went well: change the model, and remember what was last."""

        def then(ok: Any) -> None:
            change(ok)
            self.last = name

        return then

    def refuse(self, wrong: Wrong) -> Refused:
        def refused() -> None:
            self.last = "refused"

        return refuse(wrong, refused)


class Function(Model):
    """Of a family without a state: every reply follows from the arguments. What it cannot judge raises ValueError."""

    blamed: ClassVar[Mapping[Any, str]] = {}

    def looks(self) -> list[Look]:
        return []
