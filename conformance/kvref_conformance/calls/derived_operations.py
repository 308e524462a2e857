"""Derived operations: operations that an implementation lacks, computed from operations that it provides.

Each derivation uses an equality that a clause states, for example that `gather` equals `read` of all positions. The tables are
in families/*/derived_operations.py. The call trace contains the calls that the implementation received, not the derived
operation.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from kvref_conformance.exceptions import ClauseViolation, NotOffered
from kvref_conformance.families import all_families
from kvref_conformance.limits import Limit

SPLIT_MARK = "in_parts"  # an attribute of exceptions that `call_in_order` sets


@dataclass(frozen=True)
class DerivedOperation:
    """One way to derive one operation.

    name: the operation. clause: the clause that states the equality; checks of this clause do not use the derivation, because it
    would make them circular. uses: the operations that it calls. derive: a function of the object and the operation's arguments
    (by name). It returns the result, raises the operation's error, or raises NotOffered for arguments that the equality does not
    cover. splits_appends: whether it appends the tokens of one call in several calls; checks of LAW-06 do not use such a
    derivation.
    """

    name: str
    clause: str
    uses: tuple[str, ...]
    derive: Callable[..., Any]
    splits_appends: bool = False

    def __str__(self) -> str:
        return f"{self.name} through {' and '.join(self.uses)}"


@cache
def derivations(op: str) -> tuple[DerivedOperation, ...]:
    """The derivations of an operation, in the order in which to try them. op: its name in a request, as "paged.gather"."""
    family, _, name = op.partition(".")
    record = all_families().get(family)
    module = record.part("derived_operations") if record else None
    table: Iterable[DerivedOperation] = module.DERIVED if module else ()
    return tuple(each for each in table if each.name == name)


def call_in_order(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """Make the calls in order, and return their results. If a call raises, the error is raised and the rest are not made.

    Earlier calls cannot be undone. Unless the first call raised, the error is therefore marked with SPLIT_MARK.
    """
    results = list[Any]()
    for number, call in enumerate(calls):
        try:
            results.append(call())
        except (ClauseViolation, NotOffered):
            raise
        except Exception as error:
            if number:
                vars(error)[SPLIT_MARK] = True
            raise
    return results


def require_unsplit_error(error: Exception) -> None:
    """Raise NotOffered if the error is marked with SPLIT_MARK. For checks that a call that raises changes nothing."""
    if SPLIT_MARK in vars(error):
        raise NotOffered(
            f"an error that changes nothing, in an operation derived from several calls ({type(error).__name__})"
        ) from error


def split_append(op: str, args: Mapping[str, Any], limit: Limit) -> list[dict[str, Any]] | None:
    """Split the arguments of an appending call into calls with a number of tokens that `limit` allows (equal by LAW-06).

    Returns None if no split is necessary, if the operation does not append, or if its arrays have different numbers of tokens.
    Raises NotOffered if no split exists, for example for zero tokens where the limit is at least one.
    """
    family, _, name = op.partition(".")
    record = all_families().get(family)
    if record is None or name not in record.appending:
        return None
    arrays = {each: args.get(each) for each in record.appending[name]}
    axis = record.token_axis
    shapes = [getattr(getattr(array, "array", array), "shape", ()) for array in arrays.values()]  # also of an OwnArray
    lengths = {shape[axis] if len(shape) >= max(1, -axis) else -1 for shape in shapes}
    if len(lengths) > 1 and limit.largest_up_to(max(lengths)) != max(lengths):
        raise NotOffered(f"arrays of different lengths, up to {max(lengths)} tokens, where its limits say {limit}")
    if len(lengths) != 1 or (length := lengths.pop()) < 0 or limit.allows(length):
        return None
    if args.get("counts") is not None:
        raise NotOffered(f"{length} columns of which some are padding, where its limits say {limit}")
    parts, start = list[range](), 0
    while start < length or not length:
        size = limit.largest_up_to(length - start)
        if size is None:
            raise NotOffered(f"{length} tokens, where its limits say {limit}")
        parts.append(range(start, start + size))
        start += size
    # The first call gets the caller's `start` unchanged, because its integer type may matter (LAW-20); sums use Python integers.
    starts = [{"start": int(args["start"]) + part.start} if "start" in args and part.start else {} for part in parts]
    slices = [{each: slice_tokens(array, axis, part) for each, array in arrays.items()} for part in parts]
    return [{**args, **arrays, **where} for arrays, where in zip(slices, starts, strict=True)]


def slice_tokens(array: Any, axis: int, part: range) -> Any:
    """The tokens `part` of an array along `axis`. For an OwnArray: a view of the implementation's array, without a copy."""
    whole = array if isinstance(array, np.ndarray) else array.array
    index = [slice(None)] * len(whole.shape)
    index[axis] = slice(part.start, part.stop)
    taken = whole[tuple(index)]
    return taken if isinstance(array, np.ndarray) else type(array)(taken)
