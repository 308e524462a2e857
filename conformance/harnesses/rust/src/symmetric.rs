//! INT8 and FP8: conversion of a number to a code, and of a row to codes with one float32 scale.

use crate::small_float::{SmallFloat, E4M3, E5M2};

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Symmetric {
    Int8,
    E4m3,
    E5m2,
}

pub const NAMES: [&str; 3] = ["int8", "float8_e4m3fn", "float8_e5m2"];

impl Symmetric {
    pub fn named(name: &str) -> Option<Symmetric> {
        match name {
            "int8" => Some(Symmetric::Int8),
            "float8_e4m3fn" => Some(Symmetric::E4m3),
            "float8_e5m2" => Some(Symmetric::E5m2),
            _ => None,
        }
    }

    /// The largest magnitude of a code.
    pub fn limit(self) -> f32 {
        match self {
            Symmetric::Int8 => 127.0,
            Symmetric::E4m3 => 448.0,
            Symmetric::E5m2 => 57344.0,
        }
    }

    fn float(self) -> SmallFloat {
        if self == Symmetric::E4m3 {
            E4M3
        } else {
            E5M2
        }
    }

    /// The code of a number: to nearest, ties to even (FP8) or away from zero (INT8).
    pub fn encode(self, x: f32) -> u8 {
        if self == Symmetric::Int8 {
            return x.round().clamp(-127.0, 127.0) as i8 as u8;
        }
        let sign = (x.to_bits() >> 31 << 7) as u8;
        let past_the_largest = if self == Symmetric::E4m3 { 0x7F } else { 0x7C }; // NaN, or infinity
        if x.is_nan() {
            return 0x7F;
        }
        if x.is_infinite() {
            return sign | past_the_largest;
        }
        let most = if self == Symmetric::E4m3 { 0x7E } else { 0x7C }; // E4M3 saturates, E5M2 goes to infinity
        sign | self.float().code(x.abs()).min(most) as u8
    }

    /// The number of a code.
    pub fn decode(self, code: u8) -> f32 {
        if self == Symmetric::Int8 {
            return f32::from(code as i8);
        }
        let sign = if code & 0x80 > 0 { -1.0 } else { 1.0 };
        match (self, code & 0x7F) {
            (Symmetric::E4m3, 0x7F) | (Symmetric::E5m2, 0x7D..) => f32::NAN,
            (Symmetric::E5m2, 0x7C) => sign * f32::INFINITY,
            (_, magnitude) => sign * self.float().magnitude(i32::from(magnitude)),
        }
    }

    /// max(fl(max|x| / limit), 2^-23): the minimum avoids a division by zero in a row of zeros.
    pub fn scale(self, row: &[f32]) -> f32 {
        let largest = row.iter().fold(0f32, |largest, x| largest.max(x.abs()));
        (largest / self.limit()).max(2f32.powi(-23))
    }

    /// Codes of a row. It divides by the scale: multiplying by the reciprocal gives a few wrong codes per million.
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

    /// Whether a row reads back finite: for a row with the largest float32, scale times largest code can overflow.
    pub fn reads_back(self, row: &[f32]) -> bool {
        row.iter().all(|x| (x.abs() / self.limit() * self.limit()).is_finite())
    }
}
