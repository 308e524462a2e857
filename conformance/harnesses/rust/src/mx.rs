//! Group formats whose scale is itself a small float: the MX formats and NVFP4 (FMT-MX).

use crate::small_float::{SmallFloat, E2M1, E2M3, E3M2};
use crate::symmetric::Symmetric;

/// The type of an element.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Element {
    Fp8(Symmetric),         // has NaN codes
    Small(SmallFloat, i32), // all codes are finite; the number is the bits without the sign
    Int8,                   // a multiple of 2^-6
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Mx {
    element: Element,
    nvidia: bool, // E4M3FN scales for 16 numbers, otherwise E8M0 scales for 32
}

pub const NAMES: [&str; 7] = ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "mxint8", "nvfp4"];

impl Mx {
    pub fn named(name: &str) -> Option<Mx> {
        let element = match name {
            "mxfp8_e4m3" => Element::Fp8(Symmetric::E4m3),
            "mxfp8_e5m2" => Element::Fp8(Symmetric::E5m2),
            "mxfp6_e2m3" => Element::Small(E2M3, 5),
            "mxfp6_e3m2" => Element::Small(E3M2, 5),
            "mxfp4" | "nvfp4" => Element::Small(E2M1, 3),
            "mxint8" => Element::Int8,
            _ => return None,
        };
        Some(Mx { element, nvidia: name == "nvfp4" })
    }

    pub fn group(self) -> usize {
        if self.nvidia {
            16
        } else {
            32
        }
    }

    pub fn bits(self) -> usize {
        match self.element {
            Element::Small(_, bits) => bits as usize + 1,
            _ => 8,
        }
    }

    /// The code of the scale of a group with this largest magnitude.
    fn scale_code(self, largest: f32) -> u8 {
        if self.nvidia {
            return Symmetric::E4m3.encode((largest / 6.0).clamp(0.015625, 448.0));
            // at least 2^-6, its smallest normal number
        }
        if largest == 0.0 {
            return 0;
        }
        let exponent = (f64::from(largest).to_bits() >> 52) as i32 - 1023; // as float64, where the subnormals of float32 are normal
        (exponent - self.largest_exponent() + 127).clamp(0, 254) as u8
    }

    /// floor(log2) of the largest element.
    fn largest_exponent(self) -> i32 {
        match self.element {
            Element::Fp8(Symmetric::E5m2) => 15,
            Element::Fp8(_) => 8,
            Element::Small(float, bits) => (((1 << bits) - 1) >> float.mantissa_bits) - 1 + float.least,
            Element::Int8 => 0,
        }
    }

    /// The code of the element nearest to a float32, ties to even, at most the largest element of its sign.
    fn encode(self, x: f32) -> u8 {
        match self.element {
            Element::Fp8(format) => format.encode(x.clamp(-format.limit(), format.limit())),
            Element::Small(float, bits) => {
                let sign = (x.to_bits() >> 31 << bits) as u8;
                sign | float.code(x.abs()).min((1 << bits) - 1) as u8
            }
            Element::Int8 => (x * 64.0).round_ties_even().clamp(-127.0, 127.0) as i8 as u8,
        }
    }

    fn decode(self, code: u8) -> f32 {
        match self.element {
            Element::Fp8(format) => format.decode(code),
            Element::Small(float, bits) => {
                let sign = if code >> bits > 0 { -1.0 } else { 1.0 };
                sign * float.magnitude(i32::from(code) & ((1 << bits) - 1))
            }
            Element::Int8 => f32::from(code as i8) / 64.0,
        }
    }

    /// The number of a scale's code, in float64, because 2^-127 is subnormal in float32.
    fn scale(self, code: u8) -> f64 {
        match code {
            _ if self.nvidia => f64::from(Symmetric::E4m3.decode(code)),
            255 => f64::NAN,
            _ => 2f64.powi(i32::from(code) - 127),
        }
    }

    /// Quantizes a row of finite numbers into packed codes and one scale per group.
    pub fn store(self, row: &[f32], codes: &mut [u8], scales: &mut [u8]) {
        codes.fill(0);
        for (i, (group, code)) in row.chunks_exact(self.group()).zip(scales).enumerate() {
            *code = self.scale_code(group.iter().fold(0f32, |largest, x| largest.max(x.abs())));
            let scale = self.scale(*code);
            for (j, x) in group.iter().enumerate() {
                // One rounding to float32, as NVFP4 requires. With a power of two, rounding changes only numbers far below the smallest element.
                put(codes, i * self.group() + j, self.bits(), self.encode((f64::from(*x) / scale) as f32));
            }
        }
    }

    pub fn read(self, codes: &[u8], scales: &[u8], row: &mut [f32]) {
        for (i, x) in row.iter_mut().enumerate() {
            *x = (f64::from(self.decode(take(codes, i, self.bits()))) * self.scale(scales[i / self.group()])) as f32;
        }
    }
}

/// Bit k of code i is bit (i b + k) mod 8 of byte (i b + k) div 8 (FMT-SMALL-01).
fn put(packed: &mut [u8], i: usize, bits: usize, code: u8) {
    for k in 0..bits {
        packed[(i * bits + k) / 8] |= (code >> k & 1) << ((i * bits + k) % 8);
    }
}

fn take(packed: &[u8], i: usize, bits: usize) -> u8 {
    (0..bits).fold(0, |code, k| code | (packed[(i * bits + k) / 8] >> ((i * bits + k) % 8) & 1) << k)
}
