"""One request and its reply, as plain data: what a conversation with an implementation is made of.

Arguments and results are numbers, strings, None, lists, dicts, NumPy arrays, and two kinds of reference: `On` names an object the
implementation made, `ReplyTo` stands for what it answered to an earlier request, where only it could know (a sequence's id).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from kvref import errors
from kvref_conformance.arrays import NDArray
from kvref_conformance.operations import operations
from kvref_conformance.place import raised_at

KNOWN_KINDS = frozenset(name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception))
# What a person calls the result of an operation, and what an argument that refers to it is called.
GIVES = {"buffers.acquire": "buffer", "paged.create": "sequence", "blocks.allocate": "block"}
SEVERAL = {"sequences": "paged.create"}  # arguments that are lists of such
SHOWN_VALUES = 8  # an array up to this size is written out


@dataclass(frozen=True)
class On:
    """An object made by an earlier request of this id."""

    id: int


@dataclass(frozen=True)
class ReplyTo:
    """The result of an earlier request of this id."""

    id: int


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
        if self.name == "new":
            return ()
        return tuple(name for name in operations(self.family)[self.name].parameters if name in self.args)

    @cached_property
    def family(self) -> str:
        return self.op.partition(".")[0]

    @cached_property
    def name(self) -> str:
        return self.op.partition(".")[2]


@dataclass(frozen=True)
class Error:
    """kind: the first of the exception's class names that kvref.errors knows, or its own. where: the line that raised it."""

    kind: str
    message: str
    where: str = field(default="", compare=False)


@dataclass(frozen=True)
class Reply:
    ok: Any = None
    error: Error | None = None


@dataclass
class Exchange:
    request: Request
    reply: Reply | None = None  # None: none came, the implementation hung or died
    quiet: bool = field(default=False, compare=False)  # the judge only looked: left out when calls are shown


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


def referring(request: Request, before: Sequence[Exchange]) -> Request:
    """The same request with ids that the implementation chose replaced by references to its reply."""
    args = dict(request.args)

    def reference(value: Any, op: str) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            for exchange in reversed(before):  # the latest one counts: a block may be handed out again
                same_object = exchange.request.op == op and exchange.request.on == request.on
                if same_object and exchange.reply and exchange.reply.ok == value:
                    return ReplyTo(exchange.request.id)
        return value

    for op, name in GIVES.items():
        if name in args:
            args[name] = reference(args[name], op)
    for name, op in SEVERAL.items():
        if isinstance(args.get(name), list):
            args[name] = [reference(value, op) for value in args[name]]
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
        words = ", ".join(map(show, value))
        return f"({words})" if isinstance(value, tuple) else f"[{words}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {show(part)}' for name, part in value.items())}}}"
    return repr(value)


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
        made = request.family if request.name == "new" else GIVES.get(request.op)
        if made:
            count[made] = count.get(made, 0) + 1
            names[request.id] = made if count[made] == 1 else f"{made}{count[made]}"
        if not exchange.quiet:
            lines.append(_call(exchange, names))
    return lines


def _call(exchange: Exchange, names: dict[int, str]) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, list):
            return f"[{', '.join(map(shown, value))}]"
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
