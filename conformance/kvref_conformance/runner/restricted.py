"""The restricted wrapper: kvref's own caches, limited to some sizes, formats and operations. Anything else raises.

The caches are correct, so running the checks on the wrapper shows which clauses can be judged on any implementation with the same
limits. `kvref check NAME --list` uses it.
"""

import inspect
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvref import errors
from kvref_conformance.calls.operation_table import factory_operation
from kvref_conformance.families import all_families
from kvref_conformance.implementation_api import Level
from kvref_conformance.implementations import load_implementation
from kvref_conformance.implementations.backends import TOKEN_HITS
from kvref_conformance.limits import Limits
from kvref_conformance.oracle.formats import PLAIN_FORMATS


class RestrictedImplementation:
    """A restricted implementation. Raises LimitsError if the limits are invalid."""

    name, version, language = "door", "0", "python"

    def __init__(
        self,
        limits: dict[str, Any] | None = None,
        operations: Collection[str] | None = None,
        families: Collection[str] | None = None,
        formats: Sequence[str] | None = None,
        level: Level = "exact",
    ) -> None:
        """limits: as an implementation declares them. operations: the provided ones ("paged.read"). None means all."""
        self.limits, self.operations, self.level = limits, operations, level
        self._own = Limits(limits)
        self._base = load_implementation("numpy" + TOKEN_HITS * self._own.switch("prefix", "token_hits"))
        allowed = self._own.dtypes("")
        every = tuple(name for name in self._base.formats if name not in PLAIN_FORMATS or name in allowed)
        self.formats = every if formats is None else tuple(formats)
        for family in all_families() if families is None else families:
            setattr(self, family, partial(self._new, family))

    def asarray(self, values: Any) -> Any:
        return self._base.asarray(values)

    def to_numpy(self, array: Any) -> Any:
        return self._base.to_numpy(array)

    def _new(self, family: str, **config: Any) -> "RestrictedObject":
        for name, value in config.items():
            if name in all_families()[family].small and _is_size(value) and not self._own.limit(family, name).allows(value):
                raise errors.ConfigError(f"{name}: expected {self._own.limit(family, name)}, got {value!r}")
        if isinstance(config.get("pool"), RestrictedObject):
            config["pool"] = config["pool"].made
        assert set(config) <= {*factory_operation(family).arguments}
        return RestrictedObject(self, family, getattr(self._base, family)(**config))

    def require_limits(self, family: str, name: str, args: Sequence[Any]) -> None:
        """Raise the error that an implementation with these limits raises for such arguments, if they exceed the limits."""
        unsigned, dtypes = not self._own.switch(family, "negative_integers"), self._own.dtypes(family)
        for value in args if name not in ("dequantize", "decode") else ():
            is_float = isinstance(value, np.ndarray) and value.dtype.kind in "fV"
            if is_float and value.dtype.name not in dtypes:
                raise errors.DtypeMismatch(f"expected {' or '.join(dtypes)}, got {value.dtype}")
            numbers = value if isinstance(value, list | tuple) else [value]
            if unsigned and any(isinstance(number, int | np.integer) and number < 0 for number in numbers):
                raise TypeError("an unsigned integer cannot be negative")
        is_batch = name in ("append", "append_step") and family in ("paged", "prefix")
        if is_batch and len(set(args[0])) < len(args[0]) and not self._own.switch(family, "repeated_sequences"):
            raise ValueError("a sequence twice in one batch")
        record = all_families().get(family)
        if record and name in record.appending:
            array, axis = args[-1], record.token_axis
            if np.ndim(array) >= max(1, -axis) and not self._own.limit(family, "tokens").allows(array.shape[axis]):
                raise errors.ShapeMismatch(f"expected {self._own.limit(family, 'tokens')} tokens, got {array.shape[axis]}")
        if family == "attention":
            for size, at in (("head_dim", 2), ("num_kv_heads", 1)):
                if np.ndim(args[1]) == 3 and not self._own.limit(family, size).allows(args[1].shape[at]):
                    raise errors.ShapeMismatch(f"{size}: expected {self._own.limit(family, size)}, got {args[1].shape[at]}")

    def max_sequences(self, family: str) -> int | None:
        return self._own.limit(family, "sequences").most


class RestrictedObject:
    """An object of kvref of which only the provided operations are accessible."""

    def __init__(self, restricted: RestrictedImplementation, family: str, made: Any) -> None:
        self._door, self._family, self.made = restricted, family, made
        self._live_sequences: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        offered = self._door.operations
        if name.startswith("_") or (offered is not None and f"{self._family}.{name}" not in offered):
            raise AttributeError(name)
        found = getattr(self.made, name)
        if not callable(found):
            return found

        def call(*args: Any, **named: Any) -> Any:
            try:
                given = dict(inspect.signature(found).bind(*args, **named).arguments)
            except TypeError:
                given = named
            self._door.require_limits(self._family, name, list(given.values()))
            return self._track_sequences(name, found, args, named)

        return call

    def _track_sequences(self, name: str, found: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        most = self._door.max_sequences(self._family)
        if name == "create" and most is not None and len(self._live_sequences) >= most:
            raise errors.OutOfBlocks(f"out of sequences: at most {most} can be live")
        result = found(*args, **named)
        if name == "create":
            self._live_sequences.add(result)
        if name == "drop":
            self._live_sequences.discard(args[0] if args else named["sequence"])
        return RestrictedObject(self._door, "buffer", result) if name == "acquire" else result


def _is_size(value: Any) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool)
