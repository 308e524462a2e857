"""Floats of 4 to 16 bits as integer codes, encoded and decoded in Array API arithmetic, exact to the bit.

A code consists of sign, exponent and mantissa bits, as in IEEE 754. At the least exponent the mantissa has no implicit one
(subnormal numbers). `encode` determines the exponent, multiplies the number by a power of two so that the mantissa is an integer,
and rounds half to even. If the mantissa overflows by rounding, adding it to the exponent bits carries into the exponent, which is
correct because consecutive codes are consecutive numbers.
"""

from dataclasses import dataclass

from array_api_compat import array_namespace, device

from kvref.array import Array, Namespace


@dataclass(frozen=True)
class SmallFloat:
    """A binary float type of `1 + exponent_bits + mantissa_bits` bits.

    - `largest`: the code of the largest finite number.
    - `nan`: the code that a NaN is encoded as. None if the type has no NaN; a NaN is then encoded as 0.
    - `infinity`: the code of +infinity. None if the type has no infinity; finite numbers beyond the range are then encoded as
      `largest`, and an infinity as NaN if the type has one (LAW-14).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    largest: int
    nan: int | None
    infinity: int | None

    @property
    def bits(self) -> int:
        """Bits per code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def code_dtype(self) -> str:
        """The dtype of codes: uint8 or uint16."""
        return "uint16" if self.bits == 16 else "uint8"

    @property
    def bias(self) -> int:
        """The number that is subtracted from the exponent bits."""
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def max(self) -> float:
        """The largest finite number, such as 448 or 65504."""
        mantissa = self.largest % 2**self.mantissa_bits
        exponent = (self.largest >> self.mantissa_bits) - self.bias
        return float((1 + mantissa / 2**self.mantissa_bits) * 2.0**exponent)

    def encode(self, x: Array) -> Array:
        """Return the codes of float32 numbers, rounded once to nearest, ties to even: `code_dtype`, shape of `x` (FMT-FP8-02)."""
        xp = array_namespace(x)
        magnitude = xp.where(xp.isnan(x), xp.zeros_like(x), xp.abs(x))
        exponent = self._exponent(magnitude, xp)
        units = times_power(magnitude, self.mantissa_bits + self.bias - exponent)
        # Any code past the largest one means overflow. The limit keeps the conversion to integers in range.
        units = xp.round(xp.minimum(units, xp.full_like(units, 2.0 ** (self.mantissa_bits + 1))))
        code = (exponent - 1) * 2**self.mantissa_bits + xp.astype(units, xp.int32)

        overflow = self.largest if self.infinity is None else self.infinity
        code = xp.where(code > self.largest, xp.full_like(code, overflow), code)
        if self.nan is not None:
            not_a_number = xp.isnan(x) if self.infinity is not None else ~xp.isfinite(x)
            code = xp.where(not_a_number, xp.full_like(code, self.nan), code)
        code = xp.where(xp.signbit(x), code + 2 ** (self.bits - 1), code)
        return xp.astype(code, getattr(xp, self.code_dtype))

    def decode(self, codes: Array) -> Array:
        """Return the numbers of codes, exactly: float32 in the shape of `codes` (FMT-FP8-01)."""
        xp = array_namespace(codes)
        code = xp.astype(codes, xp.int32)
        magnitude = code & (2 ** (self.bits - 1) - 1)
        field = magnitude >> self.mantissa_bits
        mantissa = magnitude & (2**self.mantissa_bits - 1)
        exponent = xp.where(field == 0, xp.ones_like(field), field)
        units = mantissa + xp.where(field == 0, xp.zeros_like(field), xp.full_like(field, 2**self.mantissa_bits))
        units = xp.where(magnitude > self.largest, xp.zeros_like(units), units)  # NaN and infinity codes are set below
        value = times_power(xp.astype(units, xp.float32), exponent - self.bias - self.mantissa_bits)

        if self.infinity is not None:
            value = xp.where(magnitude == self.infinity, xp.full_like(value, float("inf")), value)
        beyond = self.largest if self.infinity is None else self.infinity
        value = xp.where(magnitude > beyond, xp.full_like(value, float("nan")), value)
        return xp.where(code >= 2 ** (self.bits - 1), -value, value)

    def _exponent(self, magnitude: Array, xp: Namespace) -> Array:
        """The exponent bits of each magnitude, int32, at least 1: subnormal numbers have the same unit as exponent 1."""
        least, most = 2 - self.bias, (self.largest >> self.mantissa_bits) - self.bias
        powers = [2.0**e for e in range(least, most + 1)]
        thresholds = xp.asarray(powers, dtype=xp.float32, device=device(magnitude))
        index = xp.searchsorted(thresholds, xp.reshape(magnitude, (-1,)), side="right")
        return xp.astype(xp.reshape(index, magnitude.shape), xp.int32) + 1


def times_power(x: Array, power: Array) -> Array:
    """Return x * 2^power, exactly if the result is a float32. power: int32 in `[-150, 151)`, in the shape of `x`.

    It multiplies twice, because bfloat16 needs powers outside the range of float32.
    """
    xp = array_namespace(x)
    table = xp.asarray([2.0**e for e in range(-75, 76)], dtype=xp.float32, device=device(x))
    half = power // 2
    for part in (half, power - half):
        index = xp.astype(xp.reshape(part + 75, (-1,)), xp.int64)
        x = x * xp.reshape(xp.take(table, index, axis=0), x.shape)
    return x


E4M3FN = SmallFloat("float8_e4m3fn", 4, 3, largest=0x7E, nan=0x7F, infinity=None)
E5M2 = SmallFloat("float8_e5m2", 5, 2, largest=0x7B, nan=0x7E, infinity=0x7C)
FLOAT16 = SmallFloat("float16", 5, 10, largest=0x7BFF, nan=0x7E00, infinity=0x7C00)
BFLOAT16 = SmallFloat("bfloat16", 8, 7, largest=0x7F7F, nan=0x7FC0, infinity=0x7F80)
E3M2 = SmallFloat("float6_e3m2", 3, 2, largest=0x1F, nan=None, infinity=None)  # elements of MX formats only
E2M3 = SmallFloat("float6_e2m3", 2, 3, largest=0x1F, nan=None, infinity=None)
E2M1 = SmallFloat("float4_e2m1", 2, 1, largest=0x07, nan=None, infinity=None)
ELEMENTS = {element.name: element for element in (E4M3FN, E5M2, FLOAT16, BFLOAT16)}
