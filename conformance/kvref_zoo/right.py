"""What every member of the zoo starts from: kvref's own arrays, and no family at all. A member adds the one it gets wrong."""

from typing import Any, ClassVar

import numpy as np

import kvref
from kvref.formats import FORMATS
from kvref_conformance.interface import Level
from kvref_conformance.oracle.formats import ROTATED, STATIC


class Right:
    """clause: the one that must catch the bug. also: others that it breaks too. bug: the public one it is modelled on, if any."""

    clause: ClassVar[str]
    also: ClassVar[tuple[str, ...]] = ()
    bug: ClassVar[str] = ""

    version = kvref.__version__
    language = "python"
    level: Level = "exact"
    formats = tuple(name for name in FORMATS if name not in (*STATIC, *ROTATED))  # few members are about those two

    name: str

    def __init_subclass__(cls) -> None:
        cls.name = f"zoo:{cls.__module__.rpartition('.')[2].replace('_', '-')}"

    def asarray(self, values: Any) -> Any:
        return np.array(values, dtype=np.float32) if values.dtype.name == "bfloat16" else np.array(values)

    def to_numpy(self, array: Any) -> Any:
        return array
