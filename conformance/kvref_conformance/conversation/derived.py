"""Operations made of others, by the specification's own equalities, for implementations that lack them.

Each family's derived.py has a table of them. The calls that are made are the implementation's own, and a conversation shows
those.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from kvref_conformance.families import all_families
from kvref_conformance.limits import Limit
from kvref_conformance.outcome import Broken, NotOffered

IN_PARTS = "in_parts"  # an attribute of errors


@dataclass(frozen=True)
class Derived:
    """name: of the operation. clause: which says that it equals `made`, and which it therefore cannot judge.

    of: the operations that it is made of. made: a function of the object and the operation's arguments, by name, which gives its
    result, raises its error, or raises NotOffered where the equality does not reach. cuts: tokens that come together are handed
    in one by one, so that nothing can be seen of LAW-06.
    """

    name: str
    clause: str
    of: tuple[str, ...]
    made: Callable[..., Any]
    cuts: bool = False

    def __str__(self) -> str:
        return f"{self.name} through {' and '.join(self.of)}"


@cache
def derivations(op: str) -> tuple[Derived, ...]:
    """Of an operation by its name in a request, in the order in which to try them."""
    family, _, name = op.partition(".")
    record = all_families().get(family)
    module = record.part("derived") if record else None
    table: Iterable[Derived] = module.DERIVED if module else ()
    return tuple(each for each in table if each.name == name)


def in_turn(calls: Iterable[Callable[[], Any]]) -> list[Any]:
    """Make calls that change something: what each of them gives. What one of them raises is what all of them raise together.

    What was done before a later one cannot be taken back: that error is `in_parts`.
    """
    given = list[Any]()
    for number, call in enumerate(calls):
        try:
            given.append(call())
        except (Broken, NotOffered):
            raise
        except Exception as error:
            if number:
                vars(error)[IN_PARTS] = True
            raise
    return given


def refused_whole(error: Exception) -> None:
    """Raises NotOffered for an error that is `in_parts`, where what is to be seen is how a call is refused."""
    if IN_PARTS in vars(error):
        raise NotOffered(f"what is refused whole, where it is done in parts ({type(error).__name__})") from error


def pieces(op: str, args: Mapping[str, Any], limit: Limit) -> list[dict[str, Any]] | None:
    """The arguments of an appending call in pieces of as many tokens as it takes (LAW-06), or None where they are not too many.

    Arrays that do not fit together stay as they are. Raises NotOffered for no tokens, where it takes none.
    """
    family, _, name = op.partition(".")
    record = all_families().get(family)
    if record is None or name not in record.appending:
        return None
    arrays = {each: args.get(each) for each in record.appending[name]}
    axis = record.token_axis
    shapes = [getattr(getattr(array, "array", array), "shape", ()) for array in arrays.values()]  # an Own's too
    lengths = {shape[axis] if len(shape) >= -axis else -1 for shape in shapes}
    if len(lengths) > 1 and limit.at_most(max(lengths)) != max(lengths):
        raise NotOffered(f"arrays that do not fit together, of {max(lengths)} tokens, where its limits say {limit}")
    if len(lengths) != 1 or (length := lengths.pop()) < 0 or limit.allows(length):
        return None
    parts, start = list[range](), 0
    while start < length or not length:
        size = limit.at_most(length - start)
        if size is None:
            raise NotOffered(f"{length} tokens, where its limits say {limit}")
        parts.append(range(start, start + size))
        start += size
    # An integer of NumPy's wraps around where Python's does not: the first piece has the one that was given.
    moved = [{"start": int(args["start"]) + part.start} if "start" in args and part.start else {} for part in parts]
    taken = [{each: cut(array, axis, part) for each, array in arrays.items()} for part in parts]
    return [{**args, **arrays, **where} for arrays, where in zip(taken, moved, strict=True)]


def cut(array: Any, axis: int, part: range) -> Any:
    """Some of an array's tokens, which lie along an axis; of the implementation's own arrays as they lie in its memory."""
    whole = array if isinstance(array, np.ndarray) else array.array
    index = [slice(None)] * len(whole.shape)
    index[axis] = slice(part.start, part.stop)
    taken = whole[tuple(index)]
    return taken if isinstance(array, np.ndarray) else type(array)(taken)
