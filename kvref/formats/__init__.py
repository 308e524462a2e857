"""How a row of numbers is stored: one small object a format, looked up by name.

`element` formats cast each number; `head` formats share a scale over one head's row; `token` formats share a scale and a zero
over all heads of a token; `group` formats share them over 16 to 128 neighbours of a head's row. Chapter FMT of the specification
says what each does, to the bit.
"""

from collections.abc import Collection

from kvref.errors import ConfigError
from kvref.formats.affine import q4, q8
from kvref.formats.base import Format, Quantized
from kvref.formats.casts import bfloat16, float16, float32
from kvref.formats.ggml import GGML_TYPES
from kvref.formats.grouped import GROUPS
from kvref.formats.microscaling import MICROSCALED
from kvref.formats.small_float import ELEMENTS, SmallFloat
from kvref.formats.symmetric import float8_e4m3fn, float8_e5m2, int8

__all__ = ["FORMATS", "Format", "Quantized", "SmallFloat", "element_format", "get_format"]

_ALL: tuple[Format, ...] = (
    float32, float16, bfloat16, int8, float8_e4m3fn, float8_e5m2, q8, q4,
    *GGML_TYPES, *MICROSCALED, *GROUPS,
)  # fmt: skip
FORMATS = {each.name: each for each in _ALL}
_OF_GROUPS = {each.name for each in GROUPS}
GROUP_NAMES = "{int,uint}{8,4,2}_g{32,64,128}_{float32,float16,bfloat16}"  # how they are called
PLAIN_DTYPES = tuple(name for name, each in FORMATS.items() if each.granularity == "element")
ROW_FORMATS = tuple(name for name, each in FORMATS.items() if each.granularity in ("head", "group"))
SCALED_FORMATS = tuple(name for name, each in FORMATS.items() if each.granularity != "element")


def get_format(name: str, among: Collection[str] = tuple(FORMATS)) -> Format:
    """The format called `name`. Raises ConfigError, naming the known ones (LAW-12)."""
    if not isinstance(name, str) or name not in among:
        named = [each for each in among if each not in _OF_GROUPS]
        spelled = [*named, GROUP_NAMES] if len(named) < len(among) else named
        raise ConfigError(f"format: expected one of {', '.join(spelled)}, got {name!r}")
    return FORMATS[name]


def element_format(name: str) -> SmallFloat:
    """The 8- or 16-bit float called `name`, for encoding single values. Raises ConfigError, naming the known ones."""
    if name not in ELEMENTS:
        raise ConfigError(f"element format: expected one of {', '.join(ELEMENTS)}, got {name!r}")
    return ELEMENTS[name]
