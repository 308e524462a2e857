"""The proxy through which checks call an object of the implementation."""

from typing import TYPE_CHECKING, Any

from kvref_conformance.calls.operation_table import operations

if TYPE_CHECKING:
    from kvref_conformance.calls.recorder import CallRecorder


class ObjectProxy:
    """A proxy of an object of the implementation, with the attributes and methods that the family's interface has."""

    def __init__(self, subject: "CallRecorder", family: str, id: int) -> None:
        self._subject, self._family, self.id = subject, family, id

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in operations(self._family):
            raise AttributeError(f"{self._family} has no operation {name!r}")
        if operations(self._family)[name].attribute:
            return self._call(name, (), {})
        return lambda *args, **kwargs: self._call(name, args, kwargs)

    @property
    def config(self) -> dict[str, Any]:
        """The sizes that the object was created with."""
        return self._subject.configs[self.id]

    def as_is(self, name: str, *args: Any, **named: Any) -> Any:
        """Call a method and return its result without conversion to NumPy. For checks of memory."""
        return self._call(name, args, named, as_is=True)

    def was_called(self, name: str) -> bool:
        """Whether the operation was called on this or on another object of its family."""
        return f"{self._family}.{name}" in self._subject.called

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], as_is: bool = False) -> Any:
        everything = dict(zip(operations(self._family)[name].parameters, args, strict=False)) | kwargs
        return self._subject.call(f"{self._family}.{name}", self.id, everything, as_is)
