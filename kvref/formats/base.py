"""The protocol of a format (Format), its stored rows (Quantized), and functions that several formats use."""

from typing import Literal, NamedTuple, Protocol

from array_api_compat import array_namespace

from kvref.array import Array, Namespace, Shape, dtype_name
from kvref.errors import ConfigError, DtypeMismatch, NonFinite, ShapeMismatch

# What shares a scale. "element": no scale. "head": one scale per row of one token and head. "token": one scale and zero per
# token, over all heads. "group": one per group of consecutive numbers of a row. "given": one for the whole cache, not stored.
Granularity = Literal["element", "head", "token", "group", "given"]


class Quantized(NamedTuple):
    """Stored rows: codes, scales and zeros.

    - `codes`: [..., code_width], of the format's `code_dtype`.
    - `scale`, `zero`: float32 [...] with one number per row, or [..., width / group] of the format's `scale_dtype` with one per
      group. None if the format does not have them, or stores them among the codes (FMT-GGML).
    """

    codes: Array
    scale: Array | None = None
    zero: Array | None = None


class Format(Protocol):
    """How rows of numbers are stored, and which numbers stored rows read back as (chapter FMT).

    A row is the last axis of an array [..., width]: the head_dim numbers of one token and head, or all numbers of a token if
    `granularity` is "token".
    """

    @property
    def name(self) -> str:
        """The name in FORMATS, such as "int8"."""

    @property
    def bits(self) -> int:
        """Bits per code."""

    @property
    def granularity(self) -> Granularity:
        """What shares a scale: "element" (none), "head", "token", "group" or "given"."""

    @property
    def group(self) -> int | None:
        """In formats of groups, how many consecutive numbers of a row share a scale; otherwise None."""

    @property
    def element(self) -> str:
        """The kind of code that one number is stored as, such as "int8", "uint4" or "float8_e4m3fn"."""

    @property
    def scale_arrays(self) -> int:
        """How many arrays are stored beside the codes: 0, 1 (scale) or 2 (scale and zero)."""

    def code_width(self, width: int) -> int:
        """Return the length of the codes of a row of `width` numbers.

        Raises ConfigError if `width` is not a multiple of the group.
        """

    def code_dtype(self, xp: object) -> str:
        """Return the dtype of the codes, by name. xp: the namespace of the arrays, which can lack float16 or bfloat16."""

    def scale_shape(self, width: int) -> Shape:
        """Return the shape of the scales of a row of `width` numbers: () for one scale, (width / group,) for one per group."""

    def scale_dtype(self, xp: object) -> str:
        """Return the dtype of scales and zeros, by name. xp: as in `code_dtype`."""

    def quantize(self, rows: Array) -> Quantized:
        """Quantize rows [..., width] of float32, float16 or bfloat16.

        Raises DtypeMismatch for other dtypes, and ConfigError if `width` is not a multiple of the group. Formats with a scale
        also raise ShapeMismatch for an array without axes, and NonFinite for a NaN, an infinity, or a row that would read back as
        an infinity (FMT-LEVEL-05).
        """

    def dequantize(self, stored: Quantized, width: int) -> Array:
        """Return the float32 rows [..., width] that `stored` reads back as."""

    def bound(self, rows: Array, stored: Quantized) -> Array:
        """Return the largest possible error of each value read back: float64 [..., width] (FMT-LEVEL-03).

        rows: the rows that were quantized. stored: what `quantize` returned for them. See `kvref.formats.bounds`.
        """


class OneScale:
    """Base class of formats with one float32 scale per row, or without stored scales."""

    group: int | None = None

    def scale_shape(self, width: int) -> Shape:
        return ()

    def scale_dtype(self, xp: object) -> str:
        return "float32"


class ScaleAGroup:
    """Base class of formats with one scale per group, stored beside the packed codes."""

    def code_width(self: Format, width: int) -> int:
        return groups(self.name, width, self.group or 1) * (self.group or 1) * self.bits // 8

    def code_dtype(self, xp: object) -> str:
        return "uint8"

    def scale_shape(self: Format, width: int) -> Shape:
        return (groups(self.name, width, self.group or 1),)


def stored_as(format: Format, rows: Shape, xp: Namespace) -> list[tuple[Shape, str]]:
    """Return the shape and dtype of the codes of rows, and of the scale and the zero if the format stores them.

    rows: the shape [..., width] of the rows. xp: the namespace of the arrays.
    """
    *outer, width = rows
    codes = (*outer, format.code_width(width)), format.code_dtype(xp)
    scale = (*outer, *format.scale_shape(width)), format.scale_dtype(xp)
    return [codes, *[scale] * format.scale_arrays]


def in_groups(name: str, rows: Array, group: int) -> Array:
    """Return rows [..., width] as [..., width / group, group]. Raises ConfigError if `width` is not a multiple of `group`."""
    width = rows.shape[-1]
    groups(name, width, group)
    return array_namespace(rows).reshape(rows, (*rows.shape[:-1], width // group, group))


def groups(name: str, width: int, group: int) -> int:
    """Return the number of groups of a row, width / group. Raises ConfigError if it is not an integer (FMT-GROUP-03)."""
    if width % group:
        raise ConfigError(f"{name} rows: expected a width that is a multiple of {group}, got {width}")
    return width // group


def check_read_back(name: str, largest: Array) -> None:
    """Raise NonFinite unless every number of `largest` is finite (FMT-LEVEL-05).

    largest: what the largest code of each row or group reads back as. name: the format's name, for the message.
    """
    xp = array_namespace(largest)
    if not bool(xp.all(xp.isfinite(largest))):
        raise NonFinite(f"{name} rows: expected values whose scale and dequantized values are finite, got larger values")


def widen(values: Array, name: str = "rows") -> Array:
    """Return a float32, float16 or bfloat16 array as float32, exactly. Raises DtypeMismatch for other dtypes (FMT-LEVEL-04)."""
    xp = array_namespace(values)
    if values.dtype == xp.float32:
        return values
    dtype = dtype_name(values, xp)
    if dtype.rpartition(".")[2] not in ("float16", "bfloat16"):
        raise DtypeMismatch(f"{name}: expected float32, float16 or bfloat16, got {dtype}")
    return xp.astype(values, xp.float32)


def finite_rows(rows: Array) -> Array:
    """Return rows [..., width] as float32.

    Raises DtypeMismatch as `widen` does, ShapeMismatch for an array without axes, NonFinite for a NaN or an infinity (LAW-14).
    """
    rows = widen(rows)
    xp = array_namespace(rows)
    if len(rows.shape) == 0:
        raise ShapeMismatch("rows: expected shape [..., width], got []")
    if not bool(xp.all(xp.isfinite(rows))):
        raise NonFinite("rows: expected finite values, got a NaN or an infinity")
    return rows
