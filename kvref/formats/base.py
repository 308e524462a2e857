"""What a format is: how a token's numbers are stored, and what they read back as."""

from typing import Literal, NamedTuple, Protocol

from array_api_compat import array_namespace

from kvref.array import Array, Namespace, Shape, dtype_name
from kvref.errors import ConfigError, DtypeMismatch, NonFinite, ShapeMismatch

# "element": no scale. "head": one scale a (token, head) row of head_dim. "token": one scale and zero a token, over all heads.
# "group": a scale for so many neighbours along head_dim. "given": one scale for all that is stored, and not stored itself.
Granularity = Literal["element", "head", "token", "group", "given"]


class Quantized(NamedTuple):
    """Rows as they are stored: codes [..., code_width], and scale and zero, each None where the format has none.

    float32 [...] where a row shares them, [..., width / group] in `scale_dtype` where a group does.
    """

    codes: Array
    scale: Array | None = None
    zero: Array | None = None


class Format(Protocol):
    """Rows are float32 [..., width]; the last axis shares a scale."""

    @property
    def name(self) -> str: ...
    @property
    def bits(self) -> int: ...
    @property
    def granularity(self) -> Granularity: ...
    @property
    def group(self) -> int | None:
        """How many neighbours along head_dim share a scale, in formats of groups."""

    @property
    def element(self) -> str:
        """What one number is stored as, in words."""

    @property
    def scale_arrays(self) -> int:
        """What goes with the codes: 0 arrays, 1 (scale) or 2 (scale and zero)."""

    def code_width(self, width: int) -> int:
        """Code elements a row of `width` values takes. Raises ConfigError for a width that is no multiple of the group."""

    def code_dtype(self, xp: object) -> str:
        """The dtype of the codes in the array namespace `xp`."""

    def scale_shape(self, width: int) -> Shape:
        """How many scales of a row of `width` values lie beside its codes: () for one, or (width / group,)."""

    def scale_dtype(self, xp: object) -> str:
        """The dtype of scales and zeros in the array namespace `xp`."""

    def quantize(self, rows: Array) -> Quantized:
        """Raises DtypeMismatch for anything but float32, float16 and bfloat16; where a scale is shared, ShapeMismatch for a lone
        number and NonFinite; ConfigError for a width that is no multiple of the group.
        """

    def dequantize(self, stored: Quantized, width: int) -> Array:
        """The float32 rows [..., width] that `stored` reads back as."""

    def bound(self, rows: Array, stored: Quantized) -> Array:
        """float64 [..., width]: the most by which a value read may differ from `rows`."""


class OneScale:
    """Of formats whose rows have one float32 scale each, or none."""

    group: int | None = None

    def scale_shape(self, width: int) -> Shape:
        return ()

    def scale_dtype(self, xp: object) -> str:
        return "float32"


class ScaleAGroup:
    """Of formats whose groups have a scale each beside their codes, which are packed."""

    def code_width(self: Format, width: int) -> int:
        return groups(self.name, width, self.group or 1) * (self.group or 1) * self.bits // 8

    def code_dtype(self, xp: object) -> str:
        return "uint8"

    def scale_shape(self: Format, width: int) -> Shape:
        return (groups(self.name, width, self.group or 1),)


def stored_as(format: Format, rows: Shape, xp: Namespace) -> list[tuple[Shape, str]]:
    """Shape and dtype of codes, scale and zero of rows [..., width], as many of them as the format has."""
    *outer, width = rows
    codes = (*outer, format.code_width(width)), format.code_dtype(xp)
    scale = (*outer, *format.scale_shape(width)), format.scale_dtype(xp)
    return [codes, *[scale] * format.scale_arrays]


def in_groups(name: str, rows: Array, group: int) -> Array:
    """Rows [..., width] as [..., width / group, group]. Raises ConfigError where that does not go."""
    width = rows.shape[-1]
    groups(name, width, group)
    return array_namespace(rows).reshape(rows, (*rows.shape[:-1], width // group, group))


def groups(name: str, width: int, group: int) -> int:
    """How many groups a row has. Raises ConfigError (FMT-GROUP-03)."""
    if width % group:
        raise ConfigError(f"{name} rows: expected a width that is a multiple of {group}, got {width}")
    return width // group


def check_read_back(name: str, largest: Array) -> None:
    """Raise NonFinite where `largest`, what the largest code of each row reads back as, is not finite (FMT-LEVEL-05)."""
    xp = array_namespace(largest)
    if not bool(xp.all(xp.isfinite(largest))):
        raise NonFinite(f"{name} rows: expected values whose scale and dequantized values are finite, got larger ones")


def widen(values: Array, name: str = "rows") -> Array:
    """float16 and bfloat16 widened to float32 exactly; float32 as it is; all else refused (FMT-LEVEL-04)."""
    xp = array_namespace(values)
    if values.dtype == xp.float32:
        return values
    dtype = dtype_name(values, xp)
    if dtype.rpartition(".")[2] not in ("float16", "bfloat16"):
        raise DtypeMismatch(f"{name}: expected float32, float16 or bfloat16, got {dtype}")
    return xp.astype(values, xp.float32)


def finite_rows(rows: Array) -> Array:
    """`rows` [..., width] widened to float32. Raises ShapeMismatch for a lone number, NonFinite at NaN or infinity (LAW-14)."""
    rows = widen(rows)
    xp = array_namespace(rows)
    if len(rows.shape) == 0:
        raise ShapeMismatch("rows: expected shape [..., width], got []")
    if not bool(xp.all(xp.isfinite(rows))):
        raise NonFinite("rows: expected finite values, got a NaN or an infinity")
    return rows
