"""Rows that reveal rounding errors in implementations of the formats."""

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import (
    FORMATS_IN_GROUPS,
    GGML_FORMATS,
    GROUP_FORMATS,
    NVFP4_FORMATS,
    ROTATED_FORMATS,
    element_of,
    ggml,
    group_of,
    hadamard_rotation,
    inner_of,
    mx,
    per_group,
    small_floats,
)
from kvref_conformance.oracle.formats.per_row import LIMIT, STEPS, worth_of


def adversarial_rows(rng: np.random.Generator, width: int, format: str, count: int = 24) -> NDArray:
    """Rows that reveal rounding errors, float32 [n, width]. Their values do not overflow when they are read."""
    if format in ROTATED_FORMATS:
        return _rotated_rows(rng, width, inner_of(format), count)
    if format in FORMATS_IN_GROUPS:
        return _group_rows(rng, width, format, count)
    limit = LIMIT.get(format, 1.0)
    gaussian = rng.normal(size=(count, width)) * 2.0 ** rng.integers(-20, 20, size=(count, 1))
    halves = rng.integers(-126, 126, size=(count, width)) + 0.5  # each quotient is a tie, because the maximum is 127
    halves[:, 0] = 127
    above_limit = rng.normal(size=(count, width))
    above_limit[:, 0] = float.fromhex("0x1.00000cp+0") * 2.0 ** rng.integers(-8, 8, size=count)  # quotient: an ulp past the limit
    below_half = np.full((2, width), 0.49999997)
    below_half[:, 0] = [127, -127]
    offset = 1000 + rng.normal(size=(count, width)) * 1e-3  # a large offset with a tiny range
    plain = np.array([[0.0] * width, [-0.0] * width, [3.25] * width, [-1e-30] * width, [1e-40] * width, [3e38] * width])
    if format in STEPS:
        plain[-1] = 1e38
    if format.startswith("float8"):
        tied = rng.choice(small_floats.midpoints(format)[:-1], size=(count, width))
        tied[:, 0] = limit
        halves = tied
    half_max = rng.normal(size=(4, width))
    half_max[:, 0], half_max[:, -1] = 2.0, 1.0 if width > 1 else 2.0  # half of the maximum: the quotient is 63.5
    half_max = np.clip(half_max, -2, 2)
    parts = [gaussian, halves, above_limit, below_half, offset, plain, half_max]
    return np.concatenate(parts).astype(np.float32)


def _rotated_rows(rng: np.random.Generator, width: int, inner: str, count: int) -> NDArray:
    """Adversarial rows, and rows that become adversarial when they are rotated."""
    rows = adversarial_rows(rng, width, inner, count)
    most = 3e4 / width**0.5 if inner in FORMATS_IN_GROUPS else 8e37 / width**1.5
    rows = np.clip(rows, -most, most)
    return np.concatenate([rows, hadamard_rotation.rotate_rows(rows)])


def static_scale_rows(rng: np.random.Generator, width: int, format: str, scale: float) -> NDArray:
    """Rows for a static scale: ties between codes with the numbers next to them, the largest numbers, and larger ones."""
    element, s = element_of(format), np.float32(scale)
    ties = (small_floats.ties_and_neighbours(element) * s).astype(np.float32)
    end = np.float32(small_floats.MAX[element]) * s
    ends = end * np.array([1, 1 + 2**-20, 1.07, 1.4, 3, 1000, 0.99], np.float32)
    rest = rng.normal(size=400).astype(np.float32) * np.float32(2.0) ** rng.integers(-9, 9, size=400).astype(np.float32) * s
    numbers = np.concatenate([ties, ends, -ends, rest, np.array([0.0, -0.0, 1e-40], np.float32)])
    return rng.permutation(np.resize(numbers, (-(-len(numbers) // width), width)).reshape(-1)).reshape(-1, width)


def _group_rows(rng: np.random.Generator, width: int, format: str, count: int) -> NDArray:
    """Rows float32 [n, width] of adversarial groups in random order. The width is a multiple of the group."""
    group = group_of(format)
    affine = format in ("q4_1", "q5_1") or (format in GROUP_FORMATS and per_group.is_affine(format))
    halves = format in GGML_FORMATS or per_group.scale_dtype(format) == "float16"
    parts = np.concatenate(
        [_tied_groups(rng, group, format, count), adversarial_rows(rng, group, "q4" if affine else "int8", count // 4)]
    )
    if affine:  # the least value is 0, with both signs in the group
        zeros = np.tile([0.0, -0.0, 1.0, -0.0], group // 4)
        parts = np.concatenate([parts, np.array([zeros, np.roll(zeros, -1)], np.float32)])
    if format == "iq4_nl":
        parts = np.concatenate([parts, _groups_between_scales(rng, group, 2 * count)])
    if format in GGML_FORMATS:
        parts = parts[~ggml.any_code(parts.astype(np.float32), format)[:, 0]]
    most = 3e4 if halves else 1e38  # the range of float16 scales and zeros
    parts = np.clip(parts, -most, most)[rng.permutation(len(parts))]
    each = width // group
    return np.asarray(np.resize(parts, (-(-len(parts) // each) * each, group)).reshape(-1, width))


def _tied_groups(rng: np.random.Generator, group: int, format: str, count: int) -> NDArray:
    """Groups of numbers halfway between the values of two codes, or next to that. The scale is a power of two."""
    ends: tuple[float, float]
    if format in GROUP_FORMATS:
        ends = (per_group.top_of(format), 0) if per_group.is_affine(format) else (per_group.top_of(format),) * 2
        worth = np.arange(0 if per_group.is_affine(format) else -ends[0], ends[0] + 1).astype(np.float64)
    elif format in GGML_FORMATS:
        ends = {"q8_0": (127, -127), "iq4_nl": (-127, 113), "q4_1": (0, 15), "q5_1": (0, 31), "q4_0": (-8, 7)}.get(
            format, (-16, 15)
        )
        worth = ggml.TABLE if format == "iq4_nl" else np.arange(min(ends), max(ends) + 1).astype(np.float64)
    else:
        ends = mx.largest(format), -mx.largest(format)
        worth = np.sort(worth_of(format))
    ties = rng.choice((worth[1:] + worth[:-1]) / 2, size=(count, group)).astype(np.float32)
    beside = np.nextafter(ties, rng.choice(np.array([-np.inf, np.inf], np.float32), size=ties.shape))
    ties = np.where(rng.integers(2, size=ties.shape), ties, beside)
    ties[:, 0], ties[:, -1] = ends
    scale = 2.0 ** rng.integers(-6, 6, size=(count, 1))
    if format in NVFP4_FORMATS:
        scale *= rng.integers(8, 16, size=(count, 1)) / 8  # scales with all mantissa bits of E4M3
    return ties * scale.astype(np.float32)


def _groups_between_scales(rng: np.random.Generator, group: int, count: int) -> NDArray:
    """Blocks of IQ4_NL whose scale is about halfway between two float16 numbers.

    If sums are added in another order, a third of the blocks get the other scale.
    """
    blocks = rng.normal(size=(count, group)).astype(np.float32)
    scale = ggml.fitted_scale(blocks)
    below = scale.astype(np.float16)
    halfway = (below.astype(np.float64) + np.nextafter(below, np.float16(np.inf))) / 2
    return (blocks * (halfway / scale)).astype(np.float32)
