//! The blocks of ggml: a float16 scale followed by 32 values (FMT-GGML).

use kvref_sdk::from_float16;

use crate::small_float::to_float16;

pub const BLOCK: usize = 32;
const LEAST_INVERTIBLE: f32 = f32::from_bits(0x0040_0000); // 2^-127: the reciprocal of a smaller number can be infinite
const IQ4_EPSILON: f32 = 1e-15;
const IQ4_VALUES: [f32; 16] =
    [-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0];

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Ggml {
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Iq4Nl,
}

pub const NAMES: [&str; 6] = ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl"];

/// A block before packing: codes, the scale, and the minimum in types that have one.
type Numbers = ([u8; BLOCK], f32, f32);

impl Ggml {
    pub fn named(name: &str) -> Option<Ggml> {
        let all = [Ggml::Q8_0, Ggml::Q4_0, Ggml::Q4_1, Ggml::Q5_0, Ggml::Q5_1, Ggml::Iq4Nl];
        NAMES.iter().position(|each| *each == name).map(|index| all[index])
    }

    fn has_least(self) -> bool {
        matches!(self, Ggml::Q4_1 | Ggml::Q5_1)
    }

    fn has_fifth_bits(self) -> bool {
        matches!(self, Ggml::Q5_0 | Ggml::Q5_1)
    }

    /// The largest code: 15 for four bits, 31 for five.
    fn top(self) -> f32 {
        if self.has_fifth_bits() {
            31.0
        } else {
            15.0
        }
    }

    /// The number of bytes of a block.
    pub fn size(self) -> usize {
        if self == Ggml::Q8_0 {
            return 2 + BLOCK;
        }
        2 + 2 * usize::from(self.has_least()) + 4 * usize::from(self.has_fifth_bits()) + BLOCK / 2
    }

    fn numbers(self, x: &[f32]) -> Numbers {
        let mut codes = [0; BLOCK];
        match self {
            Ggml::Q8_0 => {
                let scale = x.iter().fold(0f32, |largest, x| largest.max(x.abs())) / 127.0;
                let inverse = inverse(scale);
                for (code, x) in codes.iter_mut().zip(x) {
                    *code = (x * inverse).round() as i8 as u8; // f32::round rounds halves away from zero
                }
                (codes, scale, 0.0)
            }
            Ggml::Q4_0 | Ggml::Q5_0 => {
                let zero = (self.top() + 1.0) / 2.0;
                let scale = of_largest_magnitude(x) / -zero;
                let inverse = inverse(scale);
                for (code, x) in codes.iter_mut().zip(x) {
                    *code = (x * inverse + (zero + 0.5)).clamp(0.0, self.top()) as u8;
                    // `as` truncates
                }
                (codes, scale, 0.0)
            }
            Ggml::Q4_1 | Ggml::Q5_1 => {
                let least = x[1..].iter().fold(x[0], |least, x| if *x < least { *x } else { least }); // the first of 0 and -0
                let most = x[1..].iter().fold(x[0], |most, x| if *x > most { *x } else { most });
                let scale = (most - least) / self.top();
                let inverse = inverse(scale);
                for (code, x) in codes.iter_mut().zip(x) {
                    *code = ((x - least) * inverse + 0.5).clamp(0.0, self.top()) as u8;
                }
                (codes, scale, least)
            }
            Ggml::Iq4Nl => {
                let largest = of_largest_magnitude(x);
                if largest.abs() < IQ4_EPSILON {
                    return (codes, 0.0, 0.0);
                }
                let inverse = 1.0 / (largest / IQ4_VALUES[0]);
                let (mut products, mut squares) = (0f32, 0f32);
                for (code, x) in codes.iter_mut().zip(x) {
                    *code = nearest_of_table(x * inverse);
                    let (weight, worth) = (x * x, IQ4_VALUES[usize::from(*code)]);
                    products += weight * worth * x;
                    squares += weight * worth * worth;
                }
                (codes, products / squares, 0.0)
            }
        }
    }

    /// Packs a block of 32 values. Returns whether its scale and its minimum are finite in float16.
    pub fn store(self, x: &[f32], block: &mut [u8]) -> bool {
        let (codes, scale, least) = self.numbers(x);
        let (scale, least) = (to_float16(scale), to_float16(least));
        block[..2].copy_from_slice(&scale.to_le_bytes());
        let mut body = &mut block[2..];
        if self.has_least() {
            body[..2].copy_from_slice(&least.to_le_bytes());
            body = &mut body[2..];
        }
        if self.has_fifth_bits() {
            let fifths = codes.iter().enumerate().fold(0u32, |bits, (i, code)| bits | u32::from(code >> 4) << i);
            body[..4].copy_from_slice(&fifths.to_le_bytes());
            body = &mut body[4..];
        }
        if self == Ggml::Q8_0 {
            body.copy_from_slice(&codes);
        } else {
            for (i, byte) in body.iter_mut().enumerate() {
                *byte = codes[i] & 15 | codes[i + BLOCK / 2] << 4;
            }
        }
        from_float16(scale).is_finite() && from_float16(least).is_finite()
    }

    /// Dequantizes a block.
    pub fn read(self, block: &[u8], x: &mut [f32]) {
        let half = |at: usize| from_float16(u16::from_le_bytes([block[at], block[at + 1]]));
        let (scale, mut body) = (half(0), &block[2..]);
        let mut least = 0.0;
        if self.has_least() {
            least = half(2);
            body = &body[2..];
        }
        let mut fifths = 0;
        if self.has_fifth_bits() {
            fifths = u32::from_le_bytes(body[..4].try_into().unwrap());
            body = &body[4..];
        }
        for (i, x) in x.iter_mut().enumerate() {
            let nibble = body[i % (BLOCK / 2)] >> (if i < BLOCK / 2 { 0 } else { 4 }) & 15;
            let code = nibble | ((fifths >> i & 1) << 4) as u8;
            *x = match self {
                Ggml::Q8_0 => f32::from(body[i] as i8) * scale,
                Ggml::Iq4Nl => IQ4_VALUES[usize::from(code)] * scale,
                Ggml::Q4_1 | Ggml::Q5_1 => f32::from(code) * scale + least, // two roundings: Rust does not fuse a multiplication and an addition
                Ggml::Q4_0 | Ggml::Q5_0 => (f32::from(code) - (self.top() + 1.0) / 2.0) * scale,
            };
        }
    }
}

/// 1 / scale, or 0 if the reciprocal can be infinite.
fn inverse(scale: f32) -> f32 {
    if scale.abs() < LEAST_INVERTIBLE {
        0.0
    } else {
        1.0 / scale
    }
}

/// The first value with the largest magnitude; 0 if all are zeros of either sign.
fn of_largest_magnitude(x: &[f32]) -> f32 {
    x.iter().fold(0f32, |largest, x| if x.abs() > largest.abs() { *x } else { largest })
}

/// The nearest value of the table; of two values at the same distance the larger one.
fn nearest_of_table(x: f32) -> u8 {
    let (mut nearest, mut least) = (0, f32::INFINITY);
    for (i, value) in IQ4_VALUES.iter().enumerate() {
        if (x - value).abs() <= least {
            (nearest, least) = (i as u8, (x - value).abs());
        }
    }
    nearest
}
