"""Request, reply and exchange (a request with its reply) as plain data, and how they are printed. A call trace is a list of them.

Arguments and results are numbers, strings, None, lists, dicts, NumPy arrays, and two kinds of reference: `ObjectReference` is an
object that the implementation made; `ReplyReference` is the result of an earlier request, for values that the implementation
chose (such as the id of a sequence).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import takewhile
from typing import Any

import numpy as np

from kvref import errors
from kvref_conformance.calls.operation_table import operations
from kvref_conformance.calls.source_location import raised_at
from kvref_conformance.exceptions import printable
from kvref_conformance.families import all_families
from kvref_conformance.implementation_api import NDArray

KNOWN_KINDS = frozenset(name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception))
MAX_LIST_ITEMS = 24  # a list up to this length is printed in full
MAX_ARRAY_VALUES = 8  # an array up to this size is printed in full


@dataclass(frozen=True)
class ObjectReference:
    """The object that the request with this id made."""

    id: int


@dataclass(frozen=True)
class ReplyReference:
    """The result of the earlier request with this id."""

    id: int


class ArraySummary(str):
    """The dtype and shape of an array. It replaces an array that is too large for a call trace."""

    @classmethod
    def from_array(cls, array: Any) -> "ArraySummary":
        return cls(f"{array.dtype}{list(array.shape)}")

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class CallRequest:
    """One call.

    op: a family and an operation, as "paged.write". "paged.new" makes an object, which later requests name by the id of this
    request. on: the id of the object whose method is called, None for "new". args: the arguments by name.
    """

    id: int
    op: str
    on: int | None
    args: dict[str, Any]

    @property
    def positional_names(self) -> tuple[str, ...]:
        """The names of the arguments that are passed by position, in order. The others are passed by name."""
        return _positional_names(self.op, tuple(self.args))

    @property
    def family(self) -> str:
        return self.op.partition(".")[0]

    @property
    def name(self) -> str:
        return self.op.partition(".")[2]


@cache
def _positional_names(op: str, named: tuple[str, ...]) -> tuple[str, ...]:
    family, _, operation = op.partition(".")
    parameters = () if operation == "new" else operations(family)[operation].parameters
    return tuple(takewhile(lambda name: name in named, parameters))  # after an optional argument that is absent, by name


@dataclass(frozen=True)
class CallError:
    """An exception as data.

    kind: the first name in the exception's class and bases that is in kvref.errors, or else the name of its class.
    where: the line that raised it.
    """

    kind: str
    message: str
    where: str = field(default="", compare=False)


class MalformedResult(str):
    """A description of a malformed result. It replaces the result in a call trace."""


@dataclass(frozen=True)
class CallReply:
    ok: Any = None
    error: CallError | None = None


@dataclass
class Exchange:
    request: CallRequest
    reply: CallReply | None = None  # None: the call did not return; the implementation hung or its process ended
    quiet: bool = field(default=False, compare=False)  # not printed: a call that only compares state


@cache
def result_names() -> dict[str, str]:
    """The name of an operation's result ("paged.create": "sequence"). Arguments that refer to the result have the same name."""
    return {f"{family.name}.{op}": name for family in all_families().values() for op, name in family.gives.items()}


@cache
def reference_arguments() -> dict[str, str]:
    """Arguments that refer to results of operations, with the name of one result ("sequences": "sequence")."""
    found: dict[str, str] = {}
    for family in all_families().values():
        found |= {one: one for one in family.gives.values()} | dict(family.several)
    return found


def is_error_text(text: str) -> bool:
    """Whether the text of a violation is about one of the specification's errors: "OutOfBlocks to be raised", for example."""
    return text.partition(":")[0].partition(" ")[0] in KNOWN_KINDS


def error_kinds(error: BaseException) -> list[str]:
    """The names of an exception's class and of its bases."""
    return [kind.__name__ for kind in type(error).__mro__]


def to_call_error(error: BaseException) -> CallError:
    """Convert an exception to a CallError."""
    known = (name for name in error_kinds(error) if name in KNOWN_KINDS)
    try:
        said = str(error)
    except Exception:  # `__str__` raises; the failure is still reported
        said = "an exception that cannot be printed"
    return CallError(printable(next(known, type(error).__name__)), printable(said), raised_at(error))


def summarize_arrays(value: Any) -> Any:
    """An argument or a result with its larger arrays replaced by their Summary."""
    if isinstance(value, tuple):
        return tuple(map(summarize_arrays, value))
    return ArraySummary.from_array(value) if isinstance(value, np.ndarray) and value.size > MAX_ARRAY_VALUES else value


# Maps results that the implementation chose to the id of their request. The key is the name of the result and either the object
# and the integer that it returned, or None and the bytes of an array (saved data can be loaded by any object).
ChosenValues = dict[tuple[str, int | None, int | bytes], int]


def record_chosen_value(exchange: Exchange, given: ChosenValues) -> None:
    """Add a result that the implementation chose to `given`. It replaces an earlier equal one: a block can be allocated again."""
    called = result_names().get(exchange.request.op)
    chosen = exchange.reply.ok if exchange.reply and called else None
    if called and isinstance(chosen, int):
        given[called, exchange.request.on, chosen] = exchange.request.id
    elif called and isinstance(chosen, np.ndarray):
        given[called, None, chosen.tobytes()] = exchange.request.id


def with_references(request: CallRequest, given: ChosenValues) -> CallRequest:
    """The same request with the values that the implementation chose replaced by references to its replies."""
    referable = request.args.keys() & reference_arguments().keys()
    if not referable:
        return request
    args = dict(request.args)

    def reference(called: str, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool) and (called, request.on, value) in given:
            return ReplyReference(given[called, request.on, value])
        if isinstance(value, np.ndarray) and (called, None, value.tobytes()) in given:
            return ReplyReference(given[called, None, value.tobytes()])
        return value

    for name in referable:
        called, value = reference_arguments()[name], args[name]
        args[name] = [reference(called, each) for each in value] if isinstance(value, list) else reference(called, value)
    return CallRequest(request.id, request.op, request.on, args)


def resolve_references(value: Any, replies: dict[int, Any]) -> Any:
    """A value with every ReplyReference replaced by the result in `replies`. Raises KeyError if a result is missing."""
    if isinstance(value, ReplyReference):
        return replies[value.id]
    if isinstance(value, dict):
        return {name: resolve_references(part, replies) for name, part in value.items()}
    return [resolve_references(part, replies) for part in value] if isinstance(value, list) else value


def referenced_ids(request: CallRequest) -> set[int]:
    """The ids of the earlier requests to which a request refers."""
    parts = [part for value in request.args.values() for part in (value if isinstance(value, list) else [value])]
    found = {part.id for part in parts if isinstance(part, ObjectReference | ReplyReference)}
    return found | ({request.on} if request.on is not None else set())


def format_value(value: Any) -> str:
    """An argument or a result as readable text: small arrays in full, large ones by dtype and shape."""
    if isinstance(value, ObjectReference):
        return f"#{value.id}"
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.size > MAX_ARRAY_VALUES or array.size == 0:
            return f"{array.dtype}{list(array.shape)}"
        return (
            _format_array(array)
            if array.dtype in (np.float32, np.int64) or array.ndim == 0
            else f"{array.dtype}({_format_array(array)})"
        )
    if isinstance(value, tuple | list):
        words = format_list(value, format_value)
        return f"({words})" if isinstance(value, tuple) else f"[{words}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {format_value(part)}' for name, part in value.items())}}}"
    return repr(value)


def format_list(values: Sequence[Any], show: Callable[[Any], str]) -> str:
    """The elements of a list, for a long list only the first few and the length."""
    if len(values) <= MAX_LIST_ITEMS:
        return ", ".join(map(show, values))
    return f"{', '.join(map(show, values[:MAX_ARRAY_VALUES]))}, ... {len(values)} in all"


def _format_array(array: NDArray) -> str:
    """An array as nested brackets, with the shortest digits that identify a number in its dtype: 0.1, not 0.10000000149011612."""
    if array.ndim == 0:
        return str(array[()])
    return f"[{', '.join(_format_array(part) for part in array)}]"


def format_calls(exchanges: Iterable[Exchange]) -> list[str]:
    """Each call as a line of Python, followed by its result, its error, or "did not return". Quiet calls are left out."""
    names: dict[int, str] = {}
    count: dict[str, int] = {}
    lines = []
    for exchange in exchanges:
        request = exchange.request
        made = request.family if request.name == "new" else result_names().get(request.op)
        if made:
            count[made] = count.get(made, 0) + 1
            names[request.id] = made if count[made] == 1 else f"{made}{count[made]}"
        if not exchange.quiet:
            lines.append(_format_call(exchange, names))
    return lines


def _format_call(exchange: Exchange, names: dict[int, str]) -> str:
    def shown(value: Any) -> str:
        if isinstance(value, list):
            return f"[{format_list(value, shown)}]"
        if isinstance(value, np.integer):
            return f"{value.dtype}({value})"  # the integer type can be the cause of a failure (LAW-20)
        return names.get(value.id, "?") if isinstance(value, ObjectReference | ReplyReference) else format_value(value)

    request, reply = exchange.request, exchange.reply
    words = [shown(request.args[name]) for name in request.positional_names]
    words += [f"{name}={shown(value)}" for name, value in request.args.items() if name not in request.positional_names]
    target = request.family if request.name == "new" else f"{names.get(request.on or 0, '?')}.{request.name}"
    assigned = f"{names[request.id]} = " if request.id in names else ""
    attribute = request.name != "new" and operations(request.family)[request.name].attribute
    line = assigned + target + ("" if attribute else f"({', '.join(words)})")
    if reply is None:
        return f"{line}  did not return"
    if reply.error:
        return f"{line}  raised {reply.error.kind}"
    return line if reply.ok is None or isinstance(reply.ok, ObjectReference) else f"{line}  returned {format_value(reply.ok)}"
