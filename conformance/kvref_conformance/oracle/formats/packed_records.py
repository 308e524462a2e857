"""Records: rows of a format with scales as bytes. A record has the codes, the scales and the zeros, little-endian (MLA-06)."""

import numpy as np

from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import (
    AFFINE_FORMATS,
    GGML_FORMATS,
    GROUP_FORMATS,
    MX_FORMATS,
    NVFP4_FORMATS,
    ROTATED_FORMATS,
    STATIC_FORMATS,
    SYMMETRIC_FORMATS,
    bits_of,
    ggml,
    hadamard_rotation,
    inner_of,
    mx,
    per_group,
    small_floats,
    static_scale,
)
from kvref_conformance.oracle.formats.per_row import packed, said, store


def scale_dtype(format: str) -> str:
    """The NumPy dtype of scales and zeros in a record: u1 for codes of scales, <u2 for the bits of 16-bit floats, or <f4."""
    if format in (*MX_FORMATS, *NVFP4_FORMATS):
        return "u1"
    return "<u2" if format in GROUP_FORMATS and per_group.scale_dtype(format) != "float32" else "<f4"


def written(rows: NDArray, format: str) -> NDArray:
    """The records uint8 [n, bytes] of rows [n, width]."""
    if format in ROTATED_FORMATS:
        return written(hadamard_rotation.rotate_rows(rows), inner_of(format))
    want = store(rows, format)
    if format in GGML_FORMATS:
        return packed(want, format)
    if format in STATIC_FORMATS:
        return want.codes.astype(np.uint8)
    if format in (*MX_FORMATS, *NVFP4_FORMATS):
        scales = [mx.scale_codes(rows, format)]
    else:
        affine = format in AFFINE_FORMATS or (format in GROUP_FORMATS and per_group.is_affine(format))
        scales = [want.scale, want.zero] if affine else [want.scale]
    if scale_dtype(format) == "<u2":
        scales = [small_floats.encode(each, per_group.scale_dtype(format)) for each in scales]
    codes = want.codes & 255 if format in SYMMETRIC_FORMATS else packed(want, format)
    held = [each.astype(scale_dtype(format)).reshape(len(rows), -1).view(np.uint8) for each in scales]
    return np.concatenate([codes.astype(np.uint8), *held], axis=1)


def read(records: NDArray, width: int, format: str) -> NDArray:
    """The values float32 [n, width] of records."""
    records = np.asarray(records, np.uint8)
    if format in ROTATED_FORMATS:
        return hadamard_rotation.rotate_rows(read(records, width, inner_of(format)))
    if format in GGML_FORMATS:
        return ggml.read(records, format).values
    if format in STATIC_FORMATS:
        return static_scale.decode_values(records, format, 1.0)
    end = -(-width * bits_of(format) // 8)
    codes, scales = records[:, :end], records[:, end:].copy().view(scale_dtype(format))
    affine = format in AFFINE_FORMATS or (format in GROUP_FORMATS and per_group.is_affine(format))
    scale, zero = np.split(scales, 2, axis=1) if affine else (scales, None)
    return said(codes.view(np.int8) if format == "int8" else codes, scale, zero, width, format)
