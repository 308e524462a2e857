"""Detects which operations an implementation provides, by calling each of them once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvref_conformance.checking.setup import new
from kvref_conformance.checking.steps import Got, Sizes, Steps
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families import all_families
from kvref_conformance.interface import offers
from kvref_conformance.judging.judge import Judge
from kvref_conformance.limits import Limits
from kvref_conformance.outcome import Broken, Hung, NotOffered

ELEMENTS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16")
ROWS = ("int8", "float8_e4m3fn", "float8_e5m2", "q8", "q4")
HEADS, DIM = 2, 5  # for arguments of objects that have no such sizes


@dataclass(frozen=True)
class Offered:
    """The provided and the missing operations of one family ("paged.read").

    unmade: why no object could be created, in which case both lists are empty; otherwise "".
    """

    operations: list[str]
    missing: list[str]
    unmade: str = ""


def offered(judge: Judge, families: Sequence[str]) -> dict[str, Offered]:
    """The operations by family, for the offered ones among `families`. For `Judge.run`. Raises Hung if a call does not return."""
    return {family: _family(judge.begin(), family) for family in families if offers(judge.implementation, family)}


def steps_of(subject: Subject, config: Mapping[str, Any], dim: int = DIM) -> Steps:
    """One call of each operation of the subject's family, for an object of these sizes, in a supported format if there is one.

    dim: numbers per row, if the object has no head_dim.
    """
    family, limits, formats = subject.family, subject.limits, subject.implementation.formats
    module = all_families()[family].part("steps")
    assert module is not None, family
    among = ELEMENTS if family == "elements" else ROWS
    format = next((name for name in among if name in formats), among[0])
    heads, width = limits.nearest(family, "num_kv_heads", HEADS), row_width(limits, family, dim)
    sizes = Sizes(config.get("num_kv_heads", heads), config.get("head_dim", width), config.get("num_layers", 1), format, config)
    found: Steps = module.steps(sizes)
    return found


def row_width(limits: Limits, family: str, wanted: int) -> int:
    """Numbers per row of arguments, for objects without head_dim."""
    found: int = limits.nearest(family, "width" if family == "rows" else "head_dim", wanted)
    return found


def was_asked(subject: Subject, op: str) -> bool:
    """Whether the implementation itself executed the operation. Otherwise it was declined, and may have been derived."""
    return any(exchange.request.op == op for exchange in subject.conversation)


def _family(subject: Subject, family: str) -> Offered:
    subject.family = family
    try:
        made = new(subject, family)
    except (NotOffered, Broken) as error:
        why = f"expected {error.expected}, got {error.got}" if isinstance(error, Broken) else str(error)
        return Offered([], [], " ".join(why.split()) or "no reason given")
    steps = steps_of(subject, made.config)
    objects, got, found = {family: made.id}, Got(), list[str]()
    for op, arguments in steps.items():
        try:
            got[op] = subject.call(op, objects[op.partition(".")[0]], arguments(got))
        except Hung:
            raise
        except KeyError as lacking:  # an argument is the result of another operation, which is missing or failed
            found += [op] if lacking.args[0] in found else []  # failed: assume that this operation is provided
        except Exception:  # it is provided; whether the error is correct does not matter here
            pass
        if was_asked(subject, op) and op not in found:
            found.append(op)
        if isinstance(got.get(op), Handle):
            objects["buffer"] = got[op].id
    return Offered(found, [op for op in steps if op not in found])
