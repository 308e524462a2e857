"""One request and its reply, as plain data: what a conversation with an implementation is made of.

Arguments and results are numbers, strings, None, lists, dicts, NumPy arrays, and two kinds of reference: `On` names an object the
implementation made, `ReplyTo` stands for what it answered to an earlier request, where only it could know (a sequence's id).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from kvref import errors
from kvref_conformance.arrays import NDArray
from kvref_conformance.conversation.operations import operations
from kvref_conformance.conversation.place import raised_at
from kvref_conformance.families import all_families

KNOWN_KINDS = frozenset(name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception))
SHOWN_LISTED = 24  # a list up to this length
SHOWN_VALUES = 8  # an array up to this size is written out


@dataclass(frozen=True)
class On:
    """An object made by an earlier request of this id."""

    id: int


@dataclass(frozen=True)
class ReplyTo:
    """The result of an earlier request of this id."""

    id: int


class Summary(str):
    """What stands in a conversation for an array that is too large to be kept: its dtype and shape."""

    @classmethod
    def of(cls, array: Any) -> "Summary":
        return cls(f"{array.dtype}{list(array.shape)}")

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Request:
    """op: "paged.write" and the like; "paged.new" makes an object, which is known by the request's id from then on."""

    id: int
    op: str
    on: int | None
    args: dict[str, Any]

    @property
    def given(self) -> tuple[str, ...]:
        """The arguments that are passed by position, in order; the others go by name."""
        return _given(self.op, tuple(self.args))

    @property
    def family(self) -> str:
        return self.op.partition(".")[0]

    @property
    def name(self) -> str:
        return self.op.partition(".")[2]


@cache
def _given(op: str, named: tuple[str, ...]) -> tuple[str, ...]:
    family, _, operation = op.partition(".")
    parameters = () if operation == "new" else operations(family)[operation].parameters
    return tuple(name for name in parameters if name in named)


@dataclass(frozen=True)
class Error:
    """kind: the first of the exception's class names that kvref.errors knows, or its own. where: the line that raised it."""

    kind: str
    message: str
    where: str = field(default="", compare=False)


class Misfit(str):
    """What stands in a conversation for a result that is not of the kind that the interface says."""


@dataclass(frozen=True)
class Reply:
    ok: Any = None
    error: Error | None = None


@dataclass
class Exchange:
    request: Request
    reply: Reply | None = None  # None: none came, the implementation hung or died
    quiet: bool = field(default=False, compare=False)  # the judge only looked: left out when calls are shown


@cache
def gives() -> dict[str, str]:
    """What a person calls the result of an operation, and what an argument that refers to it is called."""
    return {f"{family.name}.{op}": name for family in all_families().values() for op, name in family.gives.items()}


@cache
def references() -> dict[str, str]:
    """Of the arguments that refer to what an operation gave, or to each of a list of such, what one is called."""
    found: dict[str, str] = {}
    for family in all_families().values():
        found |= {one: one for one in family.gives.values()} | dict(family.several)
    return found


def kinds_of(error: BaseException) -> list[str]:
    """The names by which an exception is known: its class and its bases."""
    return [kind.__name__ for kind in type(error).__mro__]


def error_of(error: BaseException) -> Error:
    known = (name for name in kinds_of(error) if name in KNOWN_KINDS)
    try:
        said = str(error)
    except Exception:  # odd, but no reason to lose the failure
        said = "an exception that cannot be printed"
    return Error(next(known, type(error).__name__), said, raised_at(error))


def summarised(value: Any) -> Any:
    """An argument or a result, with what stands for its arrays in their place."""
    if isinstance(value, tuple):
        return tuple(map(summarised, value))
    return Summary.of(value) if isinstance(value, np.ndarray) and value.size > SHOWN_VALUES else value


# By what it is called, the object and the number that this gave, or the bytes that any did: the request's id.
Given = dict[tuple[str, int | None, int | bytes], int]


def note_given(exchange: Exchange, given: Given) -> None:
    """Remember what an implementation chose. The latest one counts: a block may be handed out again."""
    called = gives().get(exchange.request.op)
    chosen = exchange.reply.ok if exchange.reply and called else None
    if called and isinstance(chosen, int):
        given[called, exchange.request.on, chosen] = exchange.request.id
    elif called and isinstance(chosen, np.ndarray):  # what was saved, which another object may load
        given[called, None, chosen.tobytes()] = exchange.request.id


def referring(request: Request, given: Given) -> Request:
    """The same request with ids that the implementation chose replaced by references to its reply."""
    referable = request.args.keys() & references().keys()
    if not referable:
        return request
    args = dict(request.args)

    def reference(called: str, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool) and (called, request.on, value) in given:
            return ReplyTo(given[called, request.on, value])
        if isinstance(value, np.ndarray) and (called, None, value.tobytes()) in given:
            return ReplyTo(given[called, None, value.tobytes()])
        return value

    for name in referable:
        called, value = references()[name], args[name]
        args[name] = [reference(called, each) for each in value] if isinstance(value, list) else reference(called, value)
    return Request(request.id, request.op, request.on, args)


def resolved(value: Any, replies: dict[int, Any]) -> Any:
    """A value with every ReplyTo replaced by the reply of this conversation. Raises KeyError where there is none."""
    if isinstance(value, ReplyTo):
        return replies[value.id]
    if isinstance(value, dict):
        return {name: resolved(part, replies) for name, part in value.items()}
    return [resolved(part, replies) for part in value] if isinstance(value, list) else value


def needs(request: Request) -> set[int]:
    """The ids of the earlier requests it refers to."""
    parts = [part for value in request.args.values() for part in (value if isinstance(value, list) else [value])]
    found = {part.id for part in parts if isinstance(part, On | ReplyTo)}
    return found | ({request.on} if request.on is not None else set())


def show(value: Any) -> str:
    """An argument or a result as a person can read it: small arrays in full, large ones by shape."""
    if isinstance(value, On):
        return f"#{value.id}"
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.size > SHOWN_VALUES or array.size == 0:
            return f"{array.dtype}{list(array.shape)}"
        return (
            _brackets(array) if array.dtype in (np.float32, np.int64) or array.ndim == 0 else f"{array.dtype}({_brackets(array)})"
        )
    if isinstance(value, tuple | list):
        words = _listed(value, show)
        return f"({words})" if isinstance(value, tuple) else f"[{words}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {show(part)}' for name, part in value.items())}}}"
    return repr(value)


def _listed(values: Sequence[Any], show: Callable[[Any], str]) -> str:
    """What is in a list, of a long one the first."""
    if len(values) <= SHOWN_LISTED:
        return ", ".join(map(show, values))
    return f"{', '.join(map(show, values[:SHOWN_VALUES]))}, ... {len(values)} in all"


def _brackets(array: NDArray) -> str:
    """Nested brackets, each number as short as its dtype allows: 0.1 and not 0.10000000149011612."""
    if array.ndim == 0:
        return str(array[()])
    return f"[{', '.join(_brackets(part) for part in array)}]"


def show_calls(exchanges: Iterable[Exchange]) -> list[str]:
    """Each call as a line of Python, and what it gave where the line needs that to be understood."""
    names: dict[int, str] = {}
    count: dict[str, int] = {}
    lines = []
    for exchange in exchanges:
        request = exchange.request
        made = request.family if request.name == "new" else gives().get(request.op)
        if made:
            count[made] = count.get(made, 0) + 1
            names[request.id] = made if count[made] == 1 else f"{made}{count[made]}"
        if not exchange.quiet:
            lines.append(_call(exchange, names))
    return lines


def _call(exchange: Exchange, names: dict[int, str]) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, list):
            return f"[{_listed(value, shown)}]"
        if isinstance(value, np.integer):
            return f"{value.dtype}({value})"  # not a plain integer: that may be what matters (LAW-20)
        return names.get(value.id, "?") if isinstance(value, On | ReplyTo) else show(value)

    request, reply = exchange.request, exchange.reply
    words = [shown(request.args[name]) for name in request.given]
    words += [f"{name}={shown(value)}" for name, value in request.args.items() if name not in request.given]
    target = request.family if request.name == "new" else f"{names.get(request.on or 0, '?')}.{request.name}"
    assigned = f"{names[request.id]} = " if request.id in names else ""
    attribute = request.name != "new" and operations(request.family)[request.name].attribute
    line = assigned + target + ("" if attribute else f"({', '.join(words)})")
    if reply is None:
        return f"{line}  did not return"
    if reply.error:
        return f"{line}  raised {reply.error.kind}"
    return line if reply.ok is None or isinstance(reply.ok, On) else f"{line}  gave {show(reply.ok)}"
