"""The subject: an implementation as checks see it.

Checks use NumPy. The `Subject` converts arrays to the implementation's own type and back, raises NotOffered for a missing family
or method unless it can derive the operation, keeps all sizes within the declared limits, and records the calls, so that a
failure can be printed, shrunk and replayed.
"""

from collections.abc import Callable, Mapping
from functools import partial
from threading import local
from typing import Any

import numpy as np

from kvref_conformance.calls.derived_operations import call_in_order, derivations, split_append
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.recorder import FORMAT_ARRAYS, CallRecorder, OwnArray
from kvref_conformance.drivers.reply_validation import to_plain_data
from kvref_conformance.drivers.resource_limits import CallTimeouts
from kvref_conformance.exceptions import NotOffered, OperationDeclined
from kvref_conformance.families import all_families, names
from kvref_conformance.implementation_api import Implementation, Level
from kvref_conformance.limits import Limits
from kvref_conformance.oracle.formats import PLAIN_FORMATS, describe_formats
from kvref_conformance.oracle.formats.small_floats import round_to


class _Derivations(local):
    """The operations that one thread is deriving, and those that it derived meanwhile, with a description of the derivation."""

    def __init__(self) -> None:
        self.in_progress: list[str] = []
        self.used: list[tuple[str, str]] = []


class Subject(CallRecorder):
    """The implementation during one check, with the random generator of that check."""

    def __init__(
        self,
        implementation: Implementation,
        rng: np.random.Generator,
        timeouts: CallTimeouts | None = None,
        family: str = "",
        clause: str = "",
    ) -> None:
        """family: the family whose limits apply. clause: the clause of the check; derivations that rely on it are not used."""
        super().__init__(implementation, timeouts)
        self.rng = rng
        self.family, self.clause = family, clause
        self.limits = Limits(getattr(implementation, "limits", None), implementation.formats)
        self.derivations_used: dict[str, str] = {}  # the derived operations that were used, with a description of the derivation
        self.declined: dict[str, str] = {}  # the operations that the implementation declined, with its last message
        self.judged: Any = None  # judges its calls, in a check that has sessions (testlib/session.py)
        self._derivations = _Derivations()

    @property
    def level(self) -> Level:
        return self.implementation.level

    def formats(self, *wanted: str) -> list[str]:
        """The supported ones among the wanted formats. Raises NotOffered if there are none."""
        allowed = PLAIN_FORMATS if self._encodes else self.limits.dtypes(self.family)
        found = [
            name for name in wanted if name in self.implementation.formats and (name in allowed or name not in PLAIN_FORMATS)
        ]
        if not found:
            raise NotOffered(describe_formats(wanted))
        return found

    def size(self, name: str, wanted: int) -> int:
        """The allowed value of a size or argument that is nearest to the wanted value."""
        found: int = self.limits.nearest(self.family, name, wanted)
        return found

    def require_size(self, **least: int) -> None:
        """Raise NotOffered, with the reason, if the allowed value of a size is less than the given minimum."""
        for name, value in least.items():
            if self.size(name, value) < value:
                raise NotOffered(f"{name} {value}, where its limits say {self.limits.limit(self.family, name)}")

    def integers(self, *wanted: int) -> list[int]:
        """The integers that arguments of the implementation can have: without negative ones if its integers are unsigned."""
        signed = self.limits.switch(self.family, "negative_integers")
        return [each for each in wanted if each >= 0 or signed]

    @property
    def heads(self) -> int:
        return self.size("num_kv_heads", 2)

    @property
    def dim(self) -> int:
        return self.size("head_dim", 5)

    @property
    def dtype(self) -> str:
        """The dtype of array arguments, and the dtype of caches unless a check chooses another."""
        taken = self.limits.dtypes(self.family)
        of_its_own = () if self._encodes else self.implementation.formats
        return next((name for name in taken if name in of_its_own), taken[0])  # its formats may all be quantized

    @property
    def _encodes(self) -> bool:
        return self.family in names() and all_families()[self.family].encodes

    def require_same_process(self, what: str = "memory shared with the judge") -> None:
        """Raise NotOffered if the implementation runs in another process, where `what` cannot be observed."""
        if self.by_value:
            raise NotOffered(f"{what}, which cannot be observed through a pipe")

    def factory(self, family: str) -> Callable[..., Any]:
        """The function that creates an object of a family. Raises NotOffered."""
        assert family in names(), family
        found: Callable[..., Any] | None = getattr(self.implementation, family, None)
        if found is None:
            raise NotOffered(f"family {family}")
        for switch, counting in all_families()[family].counted_as.items():
            if self.limits.switch(family, switch):
                found = partial(counting, found)
        return found

    def new(self, family: str, **config: Any) -> "ObjectProxy":
        """Create an object of a family. Raises NotOffered."""
        self.factory(family)
        made = self.call(f"{family}.new", None, config)
        assert isinstance(made, ObjectProxy)
        return made

    def to_own_array(self, values: Any) -> OwnArray:
        """Convert to the implementation's own type. float32 is cast to a narrower float if the implementation takes only that."""
        handed = self.limits.dtypes(self.family)[0]
        if handed != "float32" and isinstance(values, np.ndarray) and values.dtype == np.float32:
            with np.errstate(over="ignore"):
                values = values.astype(narrow_dtype(handed))
        return OwnArray(self.implementation.asarray(values))

    def numpy(self, array: Any) -> Any:
        """Convert an array of the implementation to a NumPy array. Raises ClauseViolation if that fails."""
        return to_plain_data(self.implementation, array, Any, "an array")

    def call(self, op: str, on: int | None, args: dict[str, Any], as_is: bool = False) -> Any:
        """Call an operation, or derive it if the implementation declines it. Result arrays are NumPy's, unless `as_is`.

        Raises any error that the implementation raises; NotOffered; or ClauseViolation if the call hung, its process ended, or
        its result is not what the interface specifies.
        """
        if self.limits.declared:
            args = {name: self._round_argument(name, value) for name, value in args.items()}
            self._require_different_sequences(op, args)
            if (parts := self._split_append(op, args)) is not None:
                given = call_in_order(partial(self.call, op, on, part) for part in parts)
                return None if given[0] is None else np.concatenate(given)
        try:
            return self.make(op, on, args, as_is)
        except OperationDeclined as declined:
            self.declined[op] = str(declined)
            if on is None or as_is:
                raise
            return self._derived(op, on, args, declined)

    def _round_argument(self, name: str, value: Any) -> Any:
        """The argument rounded to the dtype in which it is passed. Values beyond the range of a narrow float become infinite."""
        handed = self.limits.dtypes(self.family)[0]
        narrowed = isinstance(value, np.ndarray) and value.dtype == np.float32 and name not in FORMAT_ARRAYS
        return round_to(value, handed) if narrowed else value

    def _require_different_sequences(self, op: str, args: Mapping[str, Any]) -> None:
        """Raise NotOffered if a batch contains a sequence twice, and the limits exclude that."""
        if op.endswith((".append", ".append_step")) and not self.limits.switch(self.family, "repeated_sequences"):
            sequences = args.get("sequences", ())
            if len(set(sequences)) < len(sequences):
                raise NotOffered("a sequence twice in one batch, where its limits say repeated_sequences false")

    def _split_append(self, op: str, args: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Split an append into calls of as many tokens as the limits allow; None if no split is needed. Raises NotOffered."""
        if not self.limits.switch(self.family, "negative_integers") and _has_negative_integer(args):
            raise NotOffered("negative integers: its integer types are unsigned")
        limit = self.limits.limit(self.family, "tokens")
        parts = split_append(op, args, limit)
        if parts is not None:
            if self.clause == "LAW-06":
                raise NotOffered(f"more than {limit.largest} tokens in one call, where its limits say {limit}")
            size = "one token" if limit.largest == 1 else f"at most {limit.largest} tokens"
            self._note_derivation(op, f"calls of {size}")
        return parts

    def _note_derivation(self, op: str, way: str) -> None:
        """Note that an operation is derived. A derivation inside another one counts if the outer one is not abandoned."""
        self._derivations.used.append((op, f"{op} through {way}"))
        if not self._derivations.in_progress:
            self._end_derivation()

    def _end_derivation(self) -> None:
        """Add the derivations of this thread to those of all threads."""
        for op, way in self._derivations.used:
            self.derivations_used.setdefault(op, way)
        self._derivations.used.clear()

    def _derived(self, op: str, on: int, args: dict[str, Any], declined: OperationDeclined) -> Any:
        """Derive the operation. Raises the errors of the operations that it calls, and `declined` if no derivation applies."""
        handle = ObjectProxy(self, op.partition(".")[0], on)
        for way in derivations(op):
            relied_on = self.clause == way.clause or (way.splits_appends and self.clause == "LAW-06")
            if relied_on or op in self._derivations.in_progress:
                continue
            here = self._derivations
            noted = len(here.used)
            here.in_progress.append(op)
            self._note_derivation(op, " and ".join(way.uses))
            try:
                return way.derive(handle, **args)
            except OperationDeclined:
                del here.used[noted:]  # an operation that this derivation calls is missing too
            except NotOffered:
                del here.used[noted:]
                raise
            finally:
                here.in_progress.pop()
                if not here.in_progress:
                    self._end_derivation()
        raise declined


def narrow_dtype(dtype: str) -> Any:
    """The NumPy dtype of this name. Raises NotOffered if it is not available in this environment."""
    if dtype == "float16":
        return np.float16
    try:
        from ml_dtypes import bfloat16
    except ImportError as error:
        raise NotOffered("bfloat16 arrays (the judge needs ml_dtypes to make them)") from error
    return bfloat16


def _has_negative_integer(args: Mapping[str, Any]) -> bool:
    """Whether an integer among the arguments is negative."""
    values = [each for value in args.values() for each in (value if isinstance(value, list | tuple) else [value])]
    return any(isinstance(each, int | np.integer) and each < 0 for each in values)
