//! Arrays of the protocol, {"dtype", "shape", "base64"} in little-endian C order, and the errors of a cache.

use crate::json::{object, Json};
use crate::small_float::from_float16;

/// An error of a cache. `kind` is one of the specification's error names.
#[derive(Debug)]
pub struct KvError {
    pub kind: &'static str,
    pub message: String,
}

pub type Result<T> = std::result::Result<T, KvError>;

pub fn refuse<T>(kind: &'static str, message: String) -> Result<T> {
    Err(KvError { kind, message })
}

/// Returns an integer in [0, stop), or an error of this kind.
pub fn in_range(value: &Json, stop: usize, kind: &'static str, what: &str) -> Result<usize> {
    match value.integer() {
        Some(number) if number >= 0 && (number as u64) < stop as u64 => Ok(number as usize),
        _ => refuse(kind, format!("{what}: expected an integer in [0, {stop}), got {value}")),
    }
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

/// A received array: bytes of some dtype.
pub struct Received {
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

pub fn received(array: &Json) -> Received {
    let axis = |length: &Json| length.integer().unwrap_or(0) as usize;
    Received {
        dtype: array.get("dtype").text().to_string(),
        shape: array.get("shape").list().iter().map(axis).collect(),
        bytes: from_base64(array.get("base64").text()),
    }
}

/// Returns float32 numbers, narrow floats widened. `None` in a shape allows any length. Errors: ShapeMismatch, DtypeMismatch.
pub fn floats(name: &str, array: &Json, wanted: &[Option<usize>]) -> Result<(Vec<f32>, Vec<usize>)> {
    let Received { dtype, shape, bytes } = received(array);
    if shape.len() != wanted.len() || wanted.iter().zip(&shape).any(|(want, got)| want.is_some_and(|want| want != *got)) {
        return refuse("ShapeMismatch", format!("{name}: expected shape {wanted:?}, got {shape:?}"));
    }
    let numbers = match dtype.as_str() {
        "float32" => bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect(),
        "float16" => bytes.chunks_exact(2).map(|two| from_float16(u16::from_le_bytes(two.try_into().unwrap()))).collect(),
        "bfloat16" => bytes
            .chunks_exact(2)
            .map(|two| f32::from_bits(u32::from(u16::from_le_bytes(two.try_into().unwrap())) << 16))
            .collect(),
        _ => return refuse("DtypeMismatch", format!("{name}: expected float32, float16 or bfloat16, got {dtype}")),
    };
    Ok((numbers, shape))
}

/// Encodes bytes of a dtype (little-endian).
pub fn sent(bytes: &[u8], dtype: &str, shape: &[usize]) -> Json {
    let shape = shape.iter().map(|axis| Json::from(*axis as i64)).collect();
    object([("dtype", dtype.into()), ("shape", Json::List(shape)), ("base64", Json::String(to_base64(bytes)))])
}

pub fn sent_floats(numbers: &[f32], shape: &[usize]) -> Json {
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    sent(&bytes, "float32", shape)
}
