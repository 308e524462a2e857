//! Storage formats of a row: bytes of codes, and bytes of scales in formats that store them separately.

use crate::ggml::{self, Ggml};
use crate::mx::{self, Mx};
use crate::symmetric::{self, Symmetric};
use kvref_sdk::{refuse, Result};

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Format {
    Symmetric(Symmetric), // one float32 scale per row
    Ggml(Ggml),           // scales inside the bytes of the codes
    Mx(Mx),               // a scale of one byte per group
}

pub fn names() -> Vec<&'static str> {
    symmetric::NAMES.into_iter().chain(ggml::NAMES).chain(mx::NAMES).collect()
}

impl Format {
    pub fn named(name: &str) -> Result<Format> {
        let found = Symmetric::named(name).map(Format::Symmetric).or_else(|| Ggml::named(name).map(Format::Ggml));
        match found.or_else(|| Mx::named(name).map(Format::Mx)) {
            Some(format) => Ok(format),
            None => refuse("ConfigError", format!("format: expected one of {:?}, got {name:?}", names())),
        }
    }

    /// The dtype of codes in the protocol.
    pub fn code_dtype(self) -> &'static str {
        match self {
            Format::Symmetric(Symmetric::Int8) => "int8",
            _ => "uint8",
        }
    }

    /// The dtype of separate scales, and their number per row of this width.
    pub fn scales(self, width: usize) -> Option<(&'static str, Option<usize>)> {
        match self {
            Format::Symmetric(_) => Some(("float32", None)), // one per row
            Format::Ggml(_) => None,
            Format::Mx(format) => Some(("uint8", Some(width / format.group()))),
        }
    }

    /// The number of bytes of codes, and of scales, per row of this width.
    pub fn bytes(self, width: usize) -> (usize, usize) {
        match self {
            Format::Symmetric(_) => (width, 4),
            Format::Ggml(format) => (width / ggml::BLOCK * format.size(), 0),
            Format::Mx(format) => (width * format.bits() / 8, width / format.group()),
        }
    }

    /// Error ConfigError if the width is not a multiple of the group size (FMT-GROUP-03).
    pub fn must_fit(self, width: usize) -> Result<()> {
        let group = match self {
            Format::Symmetric(_) => 1,
            Format::Ggml(_) => ggml::BLOCK,
            Format::Mx(format) => format.group(),
        };
        if width % group == 0 {
            return Ok(());
        }
        refuse("ConfigError", format!("rows: expected a width that is a multiple of {group}, got {width}"))
    }

    /// Error NonFinite if a row would not read back finite, because a NaN would become a plausible number.
    pub fn must_read_back(self, name: &str, rows: &[f32], width: usize) -> Result<()> {
        let reads_back = |row: &[f32]| match self {
            Format::Symmetric(format) => format.reads_back(row),
            Format::Ggml(format) => row.chunks_exact(ggml::BLOCK).all(|x| format.store(x, &mut vec![0; format.size()])),
            Format::Mx(_) => true, // an element times its scale is never larger than the number
        };
        if rows.iter().all(|x| x.is_finite()) && rows.chunks_exact(width.max(1)).all(reads_back) {
            return Ok(());
        }
        refuse("NonFinite", format!("{name}: expected rows that read back finite, got one that does not"))
    }

    /// Quantizes a row that reads back finite: codes and scales.
    pub fn store(self, row: &[f32], codes: &mut [u8], scales: &mut [u8]) {
        match self {
            Format::Symmetric(format) => {
                let scale = format.scale(row);
                format.quantize(row, scale, codes);
                scales.copy_from_slice(&scale.to_le_bytes());
            }
            Format::Ggml(format) => {
                for (x, block) in row.chunks_exact(ggml::BLOCK).zip(codes.chunks_exact_mut(format.size())) {
                    format.store(x, block);
                }
            }
            Format::Mx(format) => format.store(row, codes, scales),
        }
    }

    pub fn read(self, codes: &[u8], scales: &[u8], row: &mut [f32]) {
        match self {
            Format::Symmetric(format) => {
                format.dequantize(codes, f32::from_le_bytes(scales.try_into().expect("a scale of four bytes")), row)
            }
            Format::Ggml(format) => {
                for (block, x) in codes.chunks_exact(format.size()).zip(row.chunks_exact_mut(ggml::BLOCK)) {
                    format.read(block, x);
                }
            }
            Format::Mx(format) => format.read(codes, scales, row),
        }
    }
}
