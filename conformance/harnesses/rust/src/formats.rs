//! INT8 and FP8: how a number becomes a code, and a row of numbers codes with a scale.

use crate::arrays::{refuse, Result};

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Format {
    Int8,
    E4m3,
    E5m2,
}

pub const NAMES: [&str; 3] = ["int8", "float8_e4m3fn", "float8_e5m2"];

impl Format {
    pub fn named(name: &str) -> Result<Format> {
        match name {
            "int8" => Ok(Format::Int8),
            "float8_e4m3fn" => Ok(Format::E4m3),
            "float8_e5m2" => Ok(Format::E5m2),
            _ => refuse("ConfigError", format!("format: expected one of {NAMES:?}, got {name:?}")),
        }
    }

    /// The dtype in which codes travel.
    pub fn code_dtype(self) -> &'static str {
        if self == Format::Int8 {
            "int8"
        } else {
            "uint8"
        }
    }

    /// The largest magnitude a code stands for.
    fn limit(self) -> f32 {
        match self {
            Format::Int8 => 127.0,
            Format::E4m3 => 448.0,
            Format::E5m2 => 57344.0,
        }
    }

    /// Bits of the mantissa, and the exponent of the subnormals.
    fn layout(self) -> (i32, i32) {
        if self == Format::E4m3 {
            (3, -6)
        } else {
            (2, -14)
        }
    }

    /// The code of a number: to nearest, ties to even (FP8) or away from zero (INT8).
    pub fn encode(self, x: f32) -> u8 {
        if self == Format::Int8 {
            return x.round().clamp(-127.0, 127.0) as i8 as u8;
        }
        let sign = (x.to_bits() >> 31 << 7) as u8;
        let (mantissa_bits, least) = self.layout();
        let past_the_largest = if self == Format::E4m3 { 0x7F } else { 0x7C }; // NaN, or infinity
        if x.is_nan() {
            return 0x7F;
        }
        if x.is_infinite() {
            return sign | past_the_largest;
        }
        let exponent = ((x.to_bits() >> 23 & 255) as i32 - 127).max(least);
        let steps = (f64::from(x.abs()) / 2f64.powi(exponent - mantissa_bits)).round_ties_even(); // exact before it is rounded
        let code = (exponent - least) << mantissa_bits; // a carry out of the mantissa moves on to the next exponent
        let most = if self == Format::E4m3 { 0x7E } else { 0x7C }; // E4M3 saturates, E5M2 goes to infinity
        sign | (code + steps as i32).min(most) as u8
    }

    /// The number a code stands for.
    pub fn decode(self, code: u8) -> f32 {
        if self == Format::Int8 {
            return f32::from(code as i8);
        }
        let sign = if code & 0x80 > 0 { -1.0 } else { 1.0 };
        let (mantissa_bits, least) = self.layout();
        let magnitude = i32::from(code & 0x7F);
        let (exponent, mantissa) = (magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1));
        match (self, magnitude) {
            (Format::E4m3, 0x7F) | (Format::E5m2, 0x7D..) => f32::NAN,
            (Format::E5m2, 0x7C) => sign * f32::INFINITY,
            _ if exponent == 0 => sign * mantissa as f32 * 2f32.powi(least - mantissa_bits),
            _ => sign * (mantissa + (1 << mantissa_bits)) as f32 * 2f32.powi(exponent - 1 + least - mantissa_bits),
        }
    }

    /// max(fl(max|x| / limit), 2^-23): the floor keeps a row of zeros from dividing by zero.
    pub fn scale(self, row: &[f32]) -> f32 {
        let largest = row.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        (largest / self.limit()).max(2f32.powi(-23))
    }

    /// Codes of a row. The division is a division: a product with the reciprocal gets a few codes a million wrong.
    pub fn quantize(self, row: &[f32], scale: f32, codes: &mut [u8]) {
        for (x, code) in row.iter().zip(codes) {
            *code = self.encode((x / scale).clamp(-self.limit(), self.limit()));
        }
    }

    pub fn dequantize(self, codes: &[u8], scale: f32, row: &mut [f32]) {
        for (code, x) in codes.iter().zip(row) {
            *x = self.decode(*code) * scale;
        }
    }

    /// Refuses with NonFinite what would not read back finite: a NaN would become a plausible number, and where x is the largest of
    /// its row, its scale times the largest code may pass the end of float32.
    pub fn must_read_back(self, name: &str, numbers: &[f32]) -> Result<()> {
        match numbers.iter().find(|x| !(x.abs() / self.limit() * self.limit()).is_finite()) {
            Some(x) => refuse("NonFinite", format!("{name}: expected numbers that read back finite, got {x}")),
            None => Ok(()),
        }
    }
}
