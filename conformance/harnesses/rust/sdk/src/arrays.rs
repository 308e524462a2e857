//! Arrays of the protocol, `{"dtype", "shape", "base64"}` in little-endian C order.

use crate::json::{object, Json};
use crate::{refuse, Result};

/// The order of the axes of tokens and heads in your cache. The judge uses NHD, [tokens, heads, head_dim].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    Nhd,
    Hnd,
}

/// Float32 numbers in C order.
#[derive(Clone, Debug, PartialEq)]
pub struct Array {
    pub shape: Vec<usize>,
    pub numbers: Vec<f32>,
}

/// An array of any dtype: little-endian bytes in C order.
#[derive(Clone, Debug, PartialEq)]
pub struct Raw {
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl Array {
    pub fn new(shape: &[usize], numbers: Vec<f32>) -> Array {
        Array { shape: shape.to_vec(), numbers }
    }

    /// Returns float32 numbers, narrow floats widened. Error: DtypeMismatch.
    pub(crate) fn widened(name: &str, array: Raw) -> Result<Array> {
        let Raw { dtype, shape, bytes } = array;
        let codes = || bytes.chunks_exact(2).map(|two| u16::from_le_bytes(two.try_into().unwrap()));
        let numbers = match dtype.as_str() {
            "float32" => bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect(),
            "float16" => codes().map(from_float16).collect(),
            "bfloat16" => codes().map(|code| f32::from_bits(u32::from(code) << 16)).collect(),
            _ => return refuse("DtypeMismatch", format!("{name}: expected float32, float16 or bfloat16, got {dtype}")),
        };
        Ok(Array { shape, numbers })
    }

    /// The array with its axes -3 and -2 exchanged.
    pub(crate) fn swapped(self) -> Array {
        let Array { mut shape, numbers } = self;
        let [outer, inner, row] = shape[shape.len() - 3..] else { unreachable!("three axes") };
        let plane = (outer * inner * row).max(1);
        let mut swapped = vec![0f32; numbers.len()];
        for (from, to) in numbers.chunks_exact(plane).zip(swapped.chunks_exact_mut(plane)) {
            for (at, numbers) in from.chunks_exact(row).enumerate() {
                let (i, j) = (at / inner, at % inner);
                to[(j * outer + i) * row..][..row].copy_from_slice(numbers);
            }
        }
        let axes = shape.len();
        shape.swap(axes - 3, axes - 2);
        Array { shape, numbers: swapped }
    }

    pub(crate) fn sent(self) -> Json {
        let bytes = self.numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        Raw { dtype: "float32".to_string(), shape: self.shape, bytes }.sent()
    }
}

impl Raw {
    pub fn new(dtype: &str, shape: &[usize], bytes: Vec<u8>) -> Raw {
        Raw { dtype: dtype.to_string(), shape: shape.to_vec(), bytes }
    }

    pub(crate) fn integers(values: &[i64], shape: Vec<usize>) -> Raw {
        Raw::new("int64", &shape, values.iter().flat_map(|value| value.to_le_bytes()).collect())
    }

    pub(crate) fn received(array: &Json) -> Raw {
        let axis = |length: &Json| length.integer().unwrap_or(0) as usize;
        Raw {
            dtype: array.get("dtype").text().to_string(),
            shape: array.get("shape").list().iter().map(axis).collect(),
            bytes: from_base64(array.get("base64").text()),
        }
    }

    pub(crate) fn sent(self) -> Json {
        let shape = self.shape.iter().map(|axis| Json::from(*axis as i64)).collect();
        let base64 = Json::String(to_base64(&self.bytes));
        object([("dtype", self.dtype.as_str().into()), ("shape", Json::List(shape)), ("base64", base64)])
    }
}

/// Splits "keys [n, num_kv_heads, head_dim]" into a name and axes.
pub(crate) fn split(parameter: &str) -> (&str, Option<Vec<&str>>) {
    match parameter.split_once(" [") {
        Some((name, axes)) => (name, Some(axes.trim_end_matches(']').split(',').map(str::trim).collect())),
        None => (parameter, None),
    }
}

/// Converts a float16 code to its number, exactly.
pub fn from_float16(code: u16) -> f32 {
    let sign = u32::from(code & 0x8000) << 16;
    let (exponent, mantissa) = (u32::from(code >> 10 & 31), u32::from(code & 1023));
    let magnitude = match exponent {
        0 => mantissa as f32 * 2f32.powi(-24),
        31 => f32::from_bits(0x7F80_0000 | mantissa << 13),
        _ => f32::from_bits((exponent + 112) << 23 | mantissa << 13),
    };
    f32::from_bits(sign | magnitude.to_bits())
}

const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

fn from_base64(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    let (mut buffer, mut bits) = (0u32, 0);
    for digit in text.bytes() {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => break, // the padding
        };
        buffer = buffer << 6 | u32::from(value);
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push((buffer >> bits) as u8);
        }
    }
    bytes
}

fn to_base64(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let three = (0..3).fold(0u32, |three, i| three << 8 | u32::from(*chunk.get(i).unwrap_or(&0)));
        for digit in 0..4 {
            let index = (three >> (18 - 6 * digit)) as usize & 63;
            text.push(if digit <= chunk.len() { DIGITS[index] as char } else { '=' });
        }
    }
    text
}
