"""The base class of the zoo: an implementation with NumPy arrays and no family. A member adds the family that it gets wrong."""

from typing import Any, ClassVar

import numpy as np

import kvref
from kvref.formats import FORMATS
from kvref_conformance.interface import Level
from kvref_conformance.oracle.formats import ROTATED, STATIC


class Right:
    """clause: id of the clause that must find the bug. also: ids of other clauses that the member may break too.

    bug: the public issue that the bug is modelled on, as owner/repository#number, or "".
    """

    clause: ClassVar[str]
    also: ClassVar[tuple[str, ...]] = ()
    bug: ClassVar[str] = ""

    version = kvref.__version__
    language = "python"
    level: Level = "exact"
    formats = tuple(name for name in FORMATS if name not in (*STATIC, *ROTATED))  # few members use these two

    name: str

    def __init_subclass__(cls) -> None:
        cls.name = f"zoo:{cls.__module__.rpartition('.')[2].replace('_', '-')}"

    def asarray(self, values: Any) -> Any:
        return np.array(values, dtype=np.float32) if values.dtype.name == "bfloat16" else np.array(values)

    def to_numpy(self, array: Any) -> Any:
        return array
