//! A harness: a quantized KV cache and formats, which kvref calls over standard input and output (kvref/spec/protocol.md):
//!
//!     cargo build --release --manifest-path conformance/harnesses/rust/Cargo.toml
//!     kvref check --exec conformance/harnesses/rust/target/release/harness
//!
//! --bug shared-scale: all heads of a token use the scale of the first, so that heads with small numbers become zeros and heads with large numbers are clipped.

mod arrays;
mod formats;
mod ggml;
mod json;
mod mx;
mod quantized;
mod small_float;
mod symmetric;

use std::collections::HashMap;
use std::io::{self, BufRead, Write};

use arrays::{floats, in_range, received, refuse, sent, sent_floats, KvError, Result};
use formats::Format;
use json::{object, Json};
use quantized::{Config, QuantizedCache};
use symmetric::Symmetric;

enum Object {
    Elements,
    Rows,
    Quantized(QuantizedCache),
}

fn main() {
    let options: Vec<String> = std::env::args().skip(1).collect();
    let bug = options == ["--bug", "shared-scale"];
    if !options.is_empty() && !bug {
        eprintln!("usage: harness [--bug shared-scale]");
        std::process::exit(2);
    }
    let mut objects = HashMap::new();
    for line in io::stdin().lock().lines() {
        let request = Json::parse(&line.expect("standard input")).expect("a line of JSON");
        let id = request.get("id").clone();
        let reply = match perform(&request, &mut objects, bug) {
            Ok(result) => object([("id", id), ("ok", result)]),
            Err(KvError { kind, message }) => {
                object([("id", id), ("error", object([("kind", kind.into()), ("message", message.as_str().into())]))])
            }
        };
        println!("{reply}");
        io::stdout().flush().expect("standard output");
        if request.get("op").text() == "bye" {
            break;
        }
    }
}

fn about() -> Json {
    let texts = |texts: &[&str]| Json::List(texts.iter().map(|text| Json::from(*text)).collect());
    object([
        ("name", "quantized-rs".into()),
        ("version", "1.0".into()),
        ("language", "rust".into()),
        ("level", "exact".into()),
        ("formats", texts(&formats::names())),
        ("families", texts(&["elements", "rows", "quantized"])),
    ])
}

/// objects: by the id of the request that created them.
fn perform(request: &Json, objects: &mut HashMap<i64, Object>, bug: bool) -> Result<Json> {
    let (op, args) = (request.get("op").text(), request.get("args"));
    let (family, name) = op.split_once('.').unwrap_or((op, ""));
    match op {
        "hello" => {
            objects.clear(); // a new sequence of calls starts
            return Ok(about());
        }
        "bye" => return Ok(Json::Null),
        _ => {}
    }
    if name == "new" {
        let made = match family {
            "elements" => Object::Elements,
            "rows" => Object::Rows,
            "quantized" => Object::Quantized(QuantizedCache::new(configuration(args)?, bug)),
            _ => return refuse("NotOffered", format!("family {family}")),
        };
        objects.insert(request.get("id").integer().expect("an id"), made);
        return Ok(object([("handle", request.get("id").clone())]));
    }
    let on = request.get("on").integer().and_then(|id| objects.get_mut(&id));
    match (family, on) {
        ("elements", Some(Object::Elements)) => on_elements(name, args),
        ("rows", Some(Object::Rows)) => on_rows(name, args),
        ("quantized", Some(Object::Quantized(cache))) => on_cache(cache, name, args),
        _ => refuse("NotOffered", op.to_string()),
    }
}

fn configuration(args: &Json) -> Result<Config> {
    let size = |name: &str| match args.get(name).integer() {
        Some(size) if size >= 1 => Ok(size as usize),
        _ => refuse("ConfigError", format!("{name}: expected an integer of at least 1, got {}", args.get(name))),
    };
    let config = Config {
        num_layers: size("num_layers")?,
        capacity: size("capacity")?,
        num_kv_heads: size("num_kv_heads")?,
        head_dim: size("head_dim")?,
        format: Format::named(args.get("format").text())?,
    };
    config.format.must_fit(config.head_dim)?;
    Ok(config)
}

/// Casts of single values, without a scale: FP8 only.
fn on_elements(name: &str, args: &Json) -> Result<Json> {
    let name_of_format = args.get("format").text();
    let Some(format) = Symmetric::named(name_of_format) else {
        return refuse("ConfigError", format!("format: expected one of {:?}, got {name_of_format:?}", symmetric::NAMES));
    };
    match name {
        "encode" => {
            let (values, shape) = floats("values", args.get("values"), &[None])?;
            let codes: Vec<u8> = values.iter().map(|x| format.encode(*x)).collect();
            Ok(sent(&codes, "uint8", &shape))
        }
        "decode" => {
            let codes = received(args.get("codes"));
            let values: Vec<f32> = codes.bytes.iter().map(|code| format.decode(*code)).collect();
            Ok(sent_floats(&values, &codes.shape))
        }
        _ => refuse("NotOffered", format!("elements.{name}")),
    }
}

/// Quantization of rows [n, width].
fn on_rows(name: &str, args: &Json) -> Result<Json> {
    let format = Format::named(args.get("format").text())?;
    match name {
        "quantize" => {
            let (rows, shape) = floats("rows", args.get("rows"), &[None, None])?;
            let (count, width) = (shape[0], shape[1]);
            format.must_fit(width)?;
            format.must_read_back("rows", &rows, width)?;
            let (code_bytes, scale_bytes) = format.bytes(width);
            let (mut codes, mut scales) = (vec![0; count * code_bytes], vec![0; count * scale_bytes]);
            for i in 0..count {
                let scales = &mut scales[i * scale_bytes..][..scale_bytes];
                format.store(&rows[i * width..][..width], &mut codes[i * code_bytes..][..code_bytes], scales);
            }
            let scales = match format.scales(width) {
                Some((dtype, groups)) => sent(&scales, dtype, &[Some(count), groups].into_iter().flatten().collect::<Vec<_>>()),
                None => Json::Null,
            };
            Ok(Json::List(vec![sent(&codes, format.code_dtype(), &[count, code_bytes]), scales, Json::Null]))
        }
        "dequantize" => {
            let Some(width) = args.get("width").integer().filter(|width| *width >= 0).map(|width| width as usize) else {
                return refuse("ConfigError", format!("width: expected an integer of at least 0, got {}", args.get("width")));
            };
            format.must_fit(width)?;
            let (codes, scales) = (received(args.get("codes")), received(args.get("scale")));
            let (code_bytes, scale_bytes) = format.bytes(width);
            let count = codes.shape.first().copied().unwrap_or(0);
            if codes.bytes.len() != count * code_bytes || scales.bytes.len() != count * scale_bytes {
                return refuse(
                    "ShapeMismatch",
                    format!("codes: expected rows of {code_bytes} bytes and {scale_bytes} of scales"),
                );
            }
            let mut rows = vec![0f32; count * width];
            for i in 0..count {
                let scales = &scales.bytes[i * scale_bytes..][..scale_bytes];
                format.read(&codes.bytes[i * code_bytes..][..code_bytes], scales, &mut rows[i * width..][..width]);
            }
            Ok(sent_floats(&rows, &[count, width]))
        }
        _ => refuse("NotOffered", format!("rows.{name}")),
    }
}

fn on_cache(cache: &mut QuantizedCache, name: &str, args: &Json) -> Result<Json> {
    let Config { num_layers, num_kv_heads: heads, head_dim: dim, .. } = cache.config;
    let layer = || in_range(args.get("layer"), num_layers, "LayerOutOfRange", "layer");
    let position = |position: &Json, layer| in_range(position, cache.length(layer), "PositionOutOfRange", "position");
    let pair = |(keys, values): (Vec<f32>, Vec<f32>), shape: &[usize]| {
        Ok(Json::List(vec![sent_floats(&keys, shape), sent_floats(&values, shape)]))
    };
    match name {
        "append" => {
            let layer = layer()?;
            let (keys, shape) = floats("keys", args.get("keys"), &[None, Some(heads), Some(dim)])?;
            let (values, _) = floats("values", args.get("values"), &[Some(shape[0]), Some(heads), Some(dim)])?;
            cache.append(&vec![layer; shape[0]], &keys, &values).map(|()| Json::Null)
        }
        "append_step" => {
            let shape = [Some(num_layers), Some(heads), Some(dim)];
            let (keys, _) = floats("keys", args.get("keys"), &shape)?;
            let (values, _) = floats("values", args.get("values"), &shape)?;
            cache.append(&(0..num_layers).collect::<Vec<_>>(), &keys, &values).map(|()| Json::Null)
        }
        "read_head" => {
            let layer = layer()?;
            let token = cache.read(layer, &[position(args.get("position"), layer)?]);
            let head = in_range(args.get("head"), heads, "HeadOutOfRange", "head")?;
            let row = |numbers: Vec<f32>| numbers[head * dim..][..dim].to_vec();
            pair((row(token.0), row(token.1)), &[dim])
        }
        "read_token" => {
            let layer = layer()?;
            pair(cache.read(layer, &[position(args.get("position"), layer)?]), &[heads, dim])
        }
        "read_tokens" => {
            let layer = layer()?;
            let positions = args.get("positions").list().iter().map(|each| position(each, layer)).collect::<Result<Vec<_>>>()?;
            pair(cache.read(layer, &positions), &[positions.len(), heads, dim])
        }
        "length" => Ok(Json::from(cache.length(layer()?) as i64)),
        "truncate" => {
            let length = in_range(args.get("length"), cache.shortest() + 1, "PositionOutOfRange", "length")?;
            cache.truncate(length);
            Ok(Json::Null)
        }
        "clear" => {
            cache.clear();
            Ok(Json::Null)
        }
        "memory_bytes" => Ok(Json::from(cache.memory_bytes() as i64)),
        "fp32_bytes" => Ok(Json::from(cache.fp32_bytes() as i64)),
        "compression_ratio" => Ok(Json::Number(cache.fp32_bytes() as f64 / cache.memory_bytes() as f64)),
        "attend" => {
            let (query, shape) = floats("query", args.get("query"), &[None, None, Some(dim)])?;
            let Json::Number(scale) = *args.get("scale") else {
                return refuse("ConfigError", format!("scale: expected a number, got {}", args.get("scale")));
            };
            Ok(sent_floats(&cache.attend(layer()?, &query, shape[1], scale)?, &shape))
        }
        _ => refuse("NotOffered", format!("quantized.{name}")),
    }
}
