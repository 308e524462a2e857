"""The formats, grouped by kind, and their properties."""

from collections.abc import Collection, Mapping
from itertools import product
from math import isfinite
from typing import Any

PLAIN_FORMATS = ("float32", "float16", "bfloat16")
SYMMETRIC_FORMATS = ("int8", "float8_e4m3fn", "float8_e5m2")
AFFINE_FORMATS = ("q8", "q4")
GROUP_FORMATS = tuple(
    f"{kind}{bits}_g{group}_{scale}"
    for kind, bits, group, scale in product(("int", "uint"), (8, 4, 2), (32, 64, 128), PLAIN_FORMATS)
)
GGML_FORMATS = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")
MX_FORMATS = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "mxint8")
NVFP4_FORMATS = ("nvfp4",)
FORMATS_IN_GROUPS = (*GGML_FORMATS, *MX_FORMATS, *NVFP4_FORMATS, *GROUP_FORMATS)
STATIC_FORMATS = ("float8_e4m3fn_static", "float8_e5m2_static")
ROTATED_FORMATS = tuple(f"{inner}_hadamard" for inner in ("int8", "float8_e4m3fn", "q8_0", "q4_0", "int4_g32_float16"))
SCALED_FORMATS = (*SYMMETRIC_FORMATS, *AFFINE_FORMATS, *FORMATS_IN_GROUPS, *ROTATED_FORMATS, *STATIC_FORMATS)
# The kinds differ in memory layout: one scale per head, scale and zero per token, scales between the codes, and so on.
FORMAT_KINDS = (
    SYMMETRIC_FORMATS, AFFINE_FORMATS, GGML_FORMATS, MX_FORMATS, NVFP4_FORMATS,
    *(tuple(name for name in GROUP_FORMATS if name.startswith("uint") == affine) for affine in (False, True)), ROTATED_FORMATS,
    STATIC_FORMATS,
)  # fmt: skip
DRIFTING_FORMAT = "uint8_g32_bfloat16"  # quantizing its own values again often changes them; in most formats it does not

PACKED_FORMAT = "packed"  # latent rows as FP8 codes with scales, and the rope part in bfloat16
COMPONENT_FORMATS = {PACKED_FORMAT: ("float8_e4m3fn", "bfloat16")}  # supported if all of these formats are supported


def describe_formats(names: Collection[str]) -> str:
    """Formats in words, as "format int8 or q8"; a long list is shortened."""
    listed = list(names)
    shown = listed if len(listed) <= 8 else [*listed[:3], f"{len(listed) - 3} others"]
    return "format " + " or ".join(shown)


def includes_format(formats: Collection[str], name: str) -> bool:
    """Whether `formats` contains the format, or all formats that it consists of (COMPONENT_FORMATS)."""
    return all(each in formats for each in COMPONENT_FORMATS.get(name, (name,)))


def inner_of(format: str) -> str:
    """The format in which rotated rows are stored. Other formats are returned unchanged."""
    return format.removesuffix("_hadamard")


def element_of(format: str) -> str:
    """The float format of the codes of a static format."""
    return format.removesuffix("_static")


def group_of(format: str) -> int:
    """How many consecutive numbers share a scale; the row width must be a multiple. 1 for formats without groups."""
    format = inner_of(format)
    if format in GROUP_FORMATS:
        return int(format.split("_g")[1].split("_")[0])
    return 16 if format in NVFP4_FORMATS else 32 if format in FORMATS_IN_GROUPS else 1


def scales_fit(config: Mapping[str, Any], name: str) -> bool:
    """Whether the key_scale and value_scale in a configuration are valid for its format config[name] (FMT-STATIC-05)."""
    given = [config[each] for each in ("key_scale", "value_scale") if config.get(each) is not None]
    return not given or (config[name] in STATIC_FORMATS and all(isfinite(each) and each > 0 for each in given))


def dim_of(format: str, groups: int = 2) -> int:
    """A small head_dim for a format: this number of groups, or a width in which rotation has an effect, or an odd number."""
    return groups * group_of(format) if group_of(format) > 1 else 4 * groups if format in ROTATED_FORMATS else 5


def bits_of(format: str) -> int:
    """The number of bits of a code."""
    format = inner_of(format)
    if format in GROUP_FORMATS:
        return int(format.partition("_")[0].removeprefix("u").removeprefix("int"))
    known = {"q4": 4, "mxfp6_e2m3": 6, "mxfp6_e3m2": 6, "mxfp4": 4, "nvfp4": 4}
    return known.get(format, 8)
