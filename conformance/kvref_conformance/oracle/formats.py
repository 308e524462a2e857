"""The formats by what they can do, as the oracle knows them."""

from collections.abc import Collection

PLAIN = ("float32", "float16", "bfloat16")
SYMMETRIC = ("int8", "float8_e4m3fn", "float8_e5m2")
AFFINE = ("q8", "q4")

PACKED = "packed"  # latents as FP8 codes and scales, and beside them numbers that are rotated
MADE_OF = {PACKED: ("float8_e4m3fn", "bfloat16")}  # no format of its own: who has all of these may have it


def has(formats: Collection[str], name: str) -> bool:
    """Whether somebody who has these formats has one that is called so, or all that it is made of."""
    return all(each in formats for each in MADE_OF.get(name, (name,)))
