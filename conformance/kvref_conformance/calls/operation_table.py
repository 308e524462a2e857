"""The interface as data: the operations of each family, derived from its typed protocols."""

import inspect
from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_type_hints

from kvref_conformance.families import all_families


@cache
def protocols() -> dict[str, type]:
    """The typed protocols by name: of each family, and of objects that an operation returns ("buffer")."""
    found: dict[str, type] = {}
    for family in all_families().values():
        found |= {family.name: family.protocol, **getattr(family.interface, "HANDED_OUT", {})}
    return found


@dataclass(frozen=True)
class Operation:
    """A method or an attribute of a family's protocol.

    parameters: the names of the arguments that may be passed by position. arguments: the annotations of all arguments by name;
    optional: the names of those with a default. result: the annotation of the result; range_text: the same, with array shapes.
    """

    name: str
    parameters: tuple[str, ...]
    result: Any
    attribute: bool
    arguments: dict[str, Any] = field(default_factory=dict, hash=False)
    range_text: Any = None
    optional: tuple[str, ...] = ()


@cache
def operations(family: str) -> dict[str, Operation]:
    """The operations by name. family: the name of a family, or of a protocol in HANDED_OUT such as "buffer"."""
    protocol = protocols()[family]
    found = {name: Operation(name, (), hint, True) for name, hint in get_type_hints(protocol).items()}
    for part in reversed(protocol.__mro__):  # inherited operations come first
        for name, method in vars(part).items():
            if inspect.isfunction(method) and not name.startswith("_"):
                found[name] = _operation(method)
    return found


@cache
def result_protocol(reply: Any) -> str | None:
    """The name of the protocol that an operation's result has, given its annotation; None if the result is plain data."""
    return next((name for name, protocol in protocols().items() if protocol is reply), None)


@cache
def factory_operation(family: str) -> Operation:
    """The factory of a family, as an operation."""
    return _operation(getattr(all_families()[family].interface, f"{family.capitalize()}Factory").__call__)


def _operation(method: Any) -> Operation:
    every = inspect.signature(method).parameters.values()
    parameters = tuple(each.name for each in every if each.kind is each.POSITIONAL_OR_KEYWORD and each.name != "self")
    named = get_type_hints(method, include_extras=True)
    reply = get_type_hints(method)["return"]
    arguments = {each.name: named[each.name] for each in every if each.name in named and each.kind is not each.VAR_KEYWORD}
    optional = tuple(each.name for each in every if each.default is not each.empty)
    return Operation(method.__name__, parameters, reply, False, arguments, named["return"], optional)
