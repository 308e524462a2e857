"""Formats: how a row of numbers is stored. FORMATS contains one object per format, by name.

Chapter FMT of the specification defines each format to the bit. Formats differ in what shares a scale (`Format.granularity`):

- `element`: no scale, each number is cast (float16);
- `head`: one scale per row of one token and head (int8);
- `token`: one scale and one zero per token, over all its heads (q8);
- `group`: a scale, in affine formats also a zero, per 16 to 128 consecutive numbers of a row (q8_0, mxfp4, int4_g32_float16);
- `given`: one scale for the whole cache, which the caller gives (float8_e4m3fn_static).

Formats whose names end with `_hadamard` rotate rows before they quantize them.
"""

from collections.abc import Collection

from kvref.errors import ConfigError
from kvref.formats.base import Format, Quantized
from kvref.formats.casts import bfloat16, float16, float32
from kvref.formats.ggml import GGML_TYPES
from kvref.formats.group_scales import GROUPS
from kvref.formats.hadamard import HadamardFormat
from kvref.formats.microscaling import MICROSCALED
from kvref.formats.row_scales import float8_e4m3fn, float8_e5m2, int8
from kvref.formats.small_float import ELEMENTS, SmallFloat
from kvref.formats.static_scales import STATIC, StaticFloat8
from kvref.formats.token_scales import q4, q8

__all__ = ["FORMATS", "Format", "Quantized", "SmallFloat", "element_format", "get_format", "of_keys_and_values"]

_PLAIN: tuple[Format, ...] = (
    float32, float16, bfloat16, int8, float8_e4m3fn, float8_e5m2, q8, q4,
    *GGML_TYPES, *MICROSCALED, *GROUPS, *STATIC,
)  # fmt: skip
_BY_NAME = {each.name: each for each in _PLAIN}
ROTATED = tuple(HadamardFormat(_BY_NAME[name]) for name in ("int8", "float8_e4m3fn", "q8_0", "q4_0", "int4_g32_float16"))
FORMATS: dict[str, Format] = _BY_NAME | {each.name: each for each in ROTATED}
_OF_GROUPS = {each.name for each in GROUPS}
GROUP_NAMES = "{int,uint}{8,4,2}_g{32,64,128}_{float32,float16,bfloat16}"  # the names of GROUPS, short, for messages
PLAIN_DTYPES = tuple(name for name, each in FORMATS.items() if each.granularity == "element")
ROW_FORMATS = tuple(name for name, each in FORMATS.items() if each.granularity in ("head", "group", "given"))
SCALED_FORMATS = tuple(name for name, each in FORMATS.items() if each.granularity != "element")


def get_format(
    name: str, among: Collection[str] = tuple(FORMATS), scale: float | None = None, argument: str = "format"
) -> Format:
    """Return the format called `name`.

    among: the names that the caller permits. scale: the scale of a static format (FMT-STATIC), 1.0 by default. argument: what
    the caller calls the name, for the message.

    Raises ConfigError if `name` is not among them (LAW-12), if `scale` is not a positive number in range, or if it is not None
    and the format is not static.
    """
    if not isinstance(name, str) or name not in among:
        named = [each for each in among if each not in _OF_GROUPS]
        spelled = [*named, GROUP_NAMES] if len(named) < len(among) else named
        raise ConfigError(f"{argument}: expected one of {', '.join(spelled)}, got {name!r}")
    format = FORMATS[name]
    if scale is None:
        return format
    if not isinstance(format, StaticFloat8):
        raise ConfigError(f"scale: expected none ({name} computes its own scales or has none), got {scale!r}")
    return format.with_scale(scale)


def of_keys_and_values(
    name: str,
    key_scale: float | None,
    value_scale: float | None,
    among: Collection[str] = tuple(FORMATS),
    argument: str = "format",
) -> tuple[Format, Format]:
    """Return the formats of keys and of values, which differ in a given scale only (FMT-STATIC-06).

    Raises ConfigError as `get_format` does.
    """
    return get_format(name, among, key_scale, argument), get_format(name, among, value_scale, argument)


def element_format(name: str) -> SmallFloat:
    """Return the 8- or 16-bit float called `name`, which encodes and decodes single values without a scale.

    name: float8_e4m3fn, float8_e5m2, float16 or bfloat16. Raises ConfigError for any other.
    """
    if name not in ELEMENTS:
        raise ConfigError(f"element format: expected one of {', '.join(ELEMENTS)}, got {name!r}")
    return ELEMENTS[name]
