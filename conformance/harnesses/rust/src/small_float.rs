//! Small floats: sign, exponent and mantissa bits, with subnormals below the smallest exponent.

/// The caller handles magnitudes above the largest number (infinity, NaN or saturation).
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SmallFloat {
    pub mantissa_bits: i32,
    pub least: i32, // the exponent of the subnormals
}

pub const E4M3: SmallFloat = SmallFloat { mantissa_bits: 3, least: -6 };
pub const E5M2: SmallFloat = SmallFloat { mantissa_bits: 2, least: -14 };
pub const E3M2: SmallFloat = SmallFloat { mantissa_bits: 2, least: -2 };
pub const E2M3: SmallFloat = SmallFloat { mantissa_bits: 3, least: 0 };
pub const E2M1: SmallFloat = SmallFloat { mantissa_bits: 1, least: 0 };
pub const FLOAT16: SmallFloat = SmallFloat { mantissa_bits: 10, least: -14 };

impl SmallFloat {
    /// The code of a finite magnitude, nearest, ties to even. Its exponent can exceed that of the format. NaN gives 0.
    pub fn code(self, magnitude: f32) -> i32 {
        let exponent = ((magnitude.to_bits() >> 23 & 255) as i32 - 127).max(self.least);
        let steps = f64::from(magnitude) / 2f64.powi(exponent - self.mantissa_bits); // exact; rounded below
                                                                                     // A carry out of the mantissa increments the exponent.
        ((exponent - self.least) << self.mantissa_bits) + steps.round_ties_even() as i32
    }

    /// The magnitude of a code without its sign.
    pub fn magnitude(self, code: i32) -> f32 {
        let (field, mantissa) = (code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1));
        let units = if field == 0 { mantissa } else { mantissa + (1 << self.mantissa_bits) };
        units as f32 * 2f32.powi(field.max(1) - 1 + self.least - self.mantissa_bits)
    }
}

/// Converts to float16: nearest, ties to even; infinite above the largest number.
pub fn to_float16(x: f32) -> u16 {
    let sign = (x.to_bits() >> 31 << 15) as u16;
    match x {
        _ if x.is_nan() => 0x7E00,
        _ if x.is_infinite() => sign | 0x7C00,
        _ => sign | FLOAT16.code(x.abs()).min(0x7C00) as u16,
    }
}
