//! A harness: a quantized KV cache and formats, which kvref calls over standard input and output (kvref/spec/protocol.md):
//!
//!     cargo build --release --manifest-path conformance/harnesses/rust/Cargo.toml
//!     kvref check --exec conformance/harnesses/rust/target/release/harness
//!
//! --bug shared-scale: all heads of a token use the scale of the first, so that heads with small numbers become zeros and heads with large numbers are clipped.

mod formats;
mod ggml;
mod mx;
mod quantized;
mod small_float;
mod symmetric;

use kvref_sdk::json::Json;
use kvref_sdk::{in_range, not_offered, refuse, serve, About, Args, Array, Family, Layout, Object, Raw, Result, Sizes};

use formats::Format;
use quantized::{Config, QuantizedCache};
use symmetric::Symmetric;

/// Casts of single values, without a scale: FP8 only.
struct Elements;

/// Quantization of rows [n, width].
struct Rows;

fn main() {
    let options: Vec<String> = std::env::args().skip(1).collect();
    let bug = options == ["--bug", "shared-scale"];
    if !options.is_empty() && !bug {
        eprintln!("usage: harness [--bug shared-scale]");
        std::process::exit(2);
    }
    let about = About { name: "quantized-rs", version: "1.0", level: "exact", formats: formats::names(), limits: "" };
    let sizes = &["num_layers", "capacity", "num_kv_heads", "head_dim", "format: format"];
    serve(
        &about,
        &[
            Family { name: "elements", sizes: &[], layout: Layout::Nhd, make: Box::new(|_| Ok(Box::new(Elements))) },
            Family { name: "rows", sizes: &[], layout: Layout::Nhd, make: Box::new(|_| Ok(Box::new(Rows))) },
            Family {
                name: "quantized",
                sizes,
                layout: Layout::Nhd,
                make: Box::new(move |sizes| Ok(Box::new(QuantizedCache::new(configuration(sizes)?, bug)))),
            },
        ],
    );
}

fn configuration(sizes: &Sizes) -> Result<Config> {
    let config = Config {
        num_layers: sizes.size("num_layers"),
        capacity: sizes.size("capacity"),
        num_kv_heads: sizes.size("num_kv_heads"),
        head_dim: sizes.size("head_dim"),
        format: Format::named(sizes.text("format"))?,
    };
    config.format.must_fit(config.head_dim)?;
    Ok(config)
}

impl Object for Elements {
    fn call(&mut self, operation: &str, args: &Args) -> Result<Json> {
        let name = args.text("format")?;
        let Some(format) = Symmetric::named(&name) else {
            return refuse("ConfigError", format!("format: expected one of {:?}, got {name:?}", symmetric::NAMES));
        };
        match operation {
            "encode" => {
                let values = args.array("values [n]")?;
                args.reply(Raw::new("uint8", &values.shape, values.numbers.iter().map(|x| format.encode(*x)).collect()))
            }
            "decode" => {
                let codes = args.raw("codes")?;
                args.reply(Array::new(&codes.shape, codes.bytes.iter().map(|code| format.decode(*code)).collect()))
            }
            _ => not_offered(operation),
        }
    }
}

impl Object for Rows {
    fn call(&mut self, operation: &str, args: &Args) -> Result<Json> {
        let format = Format::named(&args.text("format")?)?;
        match operation {
            "quantize" => args.reply(quantize(format, &args.array("rows [n, width]")?)?),
            "dequantize" => {
                let scale = args.optional("scale", Args::raw)?;
                args.reply(dequantize(
                    format,
                    &args.raw("codes")?,
                    scale.map_or(vec![], |scale| scale.bytes),
                    args.integer("width")?,
                )?)
            }
            _ => not_offered(operation),
        }
    }
}

/// Returns codes, scales and zeros of rows.
fn quantize(format: Format, rows: &Array) -> Result<(Raw, Option<Raw>, Option<Raw>)> {
    let (count, width) = (rows.shape[0], rows.shape[1]);
    format.must_fit(width)?;
    format.must_read_back("rows", &rows.numbers, width)?;
    let (code_bytes, scale_bytes) = format.bytes(width);
    let (mut codes, mut scales) = (vec![0; count * code_bytes], vec![0; count * scale_bytes]);
    for i in 0..count {
        let scales = &mut scales[i * scale_bytes..][..scale_bytes];
        format.store(&rows.numbers[i * width..][..width], &mut codes[i * code_bytes..][..code_bytes], scales);
    }
    let scales = format.scales(width).map(|(dtype, groups)| {
        let shape: Vec<usize> = [Some(count), groups].into_iter().flatten().collect();
        Raw::new(dtype, &shape, scales)
    });
    Ok((Raw::new(format.code_dtype(), &[count, code_bytes], codes), scales, None))
}

fn dequantize(format: Format, codes: &Raw, scales: Vec<u8>, width: i64) -> Result<Array> {
    let Ok(width) = usize::try_from(width) else {
        return refuse("ConfigError", format!("width: expected an integer of at least 0, got {width}"));
    };
    format.must_fit(width)?;
    let (code_bytes, scale_bytes) = format.bytes(width);
    let count = codes.shape.first().copied().unwrap_or(0);
    if codes.bytes.len() != count * code_bytes || scales.len() != count * scale_bytes {
        return refuse("ShapeMismatch", format!("codes: expected rows of {code_bytes} bytes and {scale_bytes} of scales"));
    }
    let mut rows = vec![0f32; count * width];
    for i in 0..count {
        let scales = &scales[i * scale_bytes..][..scale_bytes];
        format.read(&codes.bytes[i * code_bytes..][..code_bytes], scales, &mut rows[i * width..][..width]);
    }
    Ok(Array::new(&[count, width], rows))
}

impl Object for QuantizedCache {
    fn call(&mut self, operation: &str, args: &Args) -> Result<Json> {
        let Config { num_layers, num_kv_heads: heads, head_dim: dim, .. } = self.config;
        let layer = || in_range(args.integer("layer")?, num_layers, "LayerOutOfRange", "layer");
        let position = |position, layer| in_range(position, self.length(layer), "PositionOutOfRange", "position");
        let pair = |(keys, values): (Vec<f32>, Vec<f32>), shape: &[usize]| {
            args.reply((Array::new(shape, keys), Array::new(shape, values)))
        };
        match operation {
            "append" => {
                let layer = layer()?;
                let keys = args.array("keys [n, num_kv_heads, head_dim]")?;
                let values = args.array("values [n, num_kv_heads, head_dim]")?;
                args.reply(self.append(&vec![layer; keys.shape[0]], &keys.numbers, &values.numbers)?)
            }
            "append_step" => {
                let keys = args.array("keys [num_layers, num_kv_heads, head_dim]")?;
                let values = args.array("values [num_layers, num_kv_heads, head_dim]")?;
                let layers: Vec<usize> = (0..num_layers).collect();
                args.reply(self.append(&layers, &keys.numbers, &values.numbers)?)
            }
            "read_head" => {
                let layer = layer()?;
                let token = self.read(layer, &[position(args.integer("position")?, layer)?]);
                let head = in_range(args.integer("head")?, heads, "HeadOutOfRange", "head")?;
                let row = |numbers: Vec<f32>| numbers[head * dim..][..dim].to_vec();
                pair((row(token.0), row(token.1)), &[dim])
            }
            "read_token" => {
                let layer = layer()?;
                pair(self.read(layer, &[position(args.integer("position")?, layer)?]), &[heads, dim])
            }
            "read_tokens" => {
                let layer = layer()?;
                let positions = args.integers("positions")?;
                let positions = positions.into_iter().map(|each| position(each, layer)).collect::<Result<Vec<_>>>()?;
                pair(self.read(layer, &positions), &[positions.len(), heads, dim])
            }
            "length" => args.reply(self.length(layer()?)),
            "truncate" => {
                let length = in_range(args.integer("length")?, self.shortest() + 1, "PositionOutOfRange", "length")?;
                args.reply(self.truncate(length))
            }
            "clear" => args.reply(self.clear()),
            "memory_bytes" => args.reply(self.memory_bytes()),
            "fp32_bytes" => args.reply(self.fp32_bytes()),
            "compression_ratio" => args.reply(self.fp32_bytes() as f64 / self.memory_bytes() as f64),
            "attend" => {
                let query = args.array("query [num_queries, num_query_heads, head_dim]")?;
                let out = self.attend(layer()?, &query.numbers, query.shape[1], args.number("scale")?)?;
                args.reply(Array::new(&query.shape, out))
            }
            _ => not_offered(operation),
        }
    }
}
