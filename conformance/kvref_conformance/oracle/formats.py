"""The formats by what they can do, as the oracle knows them."""

from collections.abc import Collection
from itertools import product

PLAIN = ("float32", "float16", "bfloat16")
SYMMETRIC = ("int8", "float8_e4m3fn", "float8_e5m2")
AFFINE = ("q8", "q4")
GROUPS = tuple(
    f"{kind}{bits}_g{group}_{scale}" for kind, bits, group, scale in product(("int", "uint"), (8, 4, 2), (32, 64, 128), PLAIN)
)
GGML = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")
MX = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "mxint8")
NVFP4 = ("nvfp4",)
IN_GROUPS = (*GGML, *MX, *NVFP4, *GROUPS)
SCALED = (*SYMMETRIC, *AFFINE, *IN_GROUPS)

PACKED = "packed"  # latents as FP8 codes and scales, and beside them numbers that are rotated
MADE_OF = {PACKED: ("float8_e4m3fn", "bfloat16")}  # no format of its own: who has all of these may have it


def either(names: Collection[str]) -> str:
    """Formats in words, of which any will do: not all of the many."""
    listed = list(names)
    shown = listed if len(listed) <= 8 else [*listed[:3], f"{len(listed) - 3} others"]
    return "format " + " or ".join(shown)


def has(formats: Collection[str], name: str) -> bool:
    """Whether somebody who has these formats has one that is called so, or all that it is made of."""
    return all(each in formats for each in MADE_OF.get(name, (name,)))


def group_of(format: str) -> int:
    """How many neighbours share a scale, which a row's width is a multiple of; 1 in formats without groups."""
    if format in GROUPS:
        return int(format.split("_g")[1].split("_")[0])
    return 16 if format in NVFP4 else 32 if format in IN_GROUPS else 1


def bits_of(format: str) -> int:
    """Of a code."""
    if format in GROUPS:
        return int(format.partition("_")[0].removeprefix("u").removeprefix("int"))
    known = {"q4": 4, "mxfp6_e2m3": 6, "mxfp6_e3m2": 6, "mxfp4": 4, "nvfp4": 4}
    return known.get(format, 8)
