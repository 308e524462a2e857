"""What a format is: how a token's numbers are stored, and what they read back as."""

from typing import Literal, NamedTuple, Protocol

from array_api_compat import array_namespace

from kvref.array import Array, dtype_name
from kvref.errors import DtypeMismatch, NonFinite, ShapeMismatch

# "element": no scale. "head": one scale a (token, head) row of head_dim. "token": one scale and zero a token, over all heads.
Granularity = Literal["element", "head", "token"]


class Quantized(NamedTuple):
    """Rows as they are stored. codes: [..., code_width]. scale, zero: float32 [...], or None where the format has none."""

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
    def scale_arrays(self) -> int:
        """How many float32 numbers go with a row: 0, 1 (scale) or 2 (scale and zero)."""

    def code_width(self, width: int) -> int:
        """Code elements a row of `width` values takes."""

    def code_dtype(self, xp: object) -> str:
        """The dtype of the codes in the array namespace `xp`."""

    def quantize(self, rows: Array) -> Quantized:
        """Raises DtypeMismatch for anything but float32, float16 and bfloat16; NonFinite where a scale is shared."""

    def dequantize(self, stored: Quantized, width: int) -> Array:
        """The float32 rows [..., width] that `stored` reads back as."""

    def bound(self, rows: Array, stored: Quantized) -> Array:
        """float64 [..., width]: the most by which a value read may differ from `rows`."""


def check_read_back(name: str, largest: Array) -> None:
    """Raise NonFinite where `largest`, what the largest code of each row reads back as, is not finite (FMT-LEVEL-05)."""
    xp = array_namespace(largest)
    if not bool(xp.all(xp.isfinite(largest))):
        raise NonFinite(
            f"{name} rows: expected rows that read back finite, got one whose scale or largest value overflows float32"
        )


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
