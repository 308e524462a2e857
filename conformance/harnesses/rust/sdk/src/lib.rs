//! The SDK of kvref for caches in Rust. It reads requests from standard input, converts them to calls of your cache, and writes the
//! replies (kvref/spec/protocol.md).
//!
//! Implement [`Object`] for a cache: one line per operation, which reads the arguments and replies with the result. Then call [`serve`]
//! with the families that you offer. Sizes are checked before an object is made, shapes and dtypes when an argument is read.

pub mod arrays;
pub mod json;

use std::cell::RefCell;
use std::collections::HashMap;
use std::io::{self, BufRead, Write};

pub use arrays::{from_float16, Array, Layout, Raw};
use json::{object, Json};

/// An error of a cache. `kind` is one of the specification's error names. An operation that returns one must change nothing.
#[derive(Debug)]
pub struct KvError {
    pub kind: &'static str,
    pub message: String,
}

pub type Result<T> = std::result::Result<T, KvError>;

pub fn refuse<T>(kind: &'static str, message: impl Into<String>) -> Result<T> {
    Err(KvError { kind, message: message.into() })
}

/// Declines an operation. It counts as neither passed nor failed.
pub fn not_offered<T>(why: &str) -> Result<T> {
    refuse("NotOffered", why)
}

/// Returns an integer in [0, stop), or an error of this kind.
pub fn in_range(value: i64, stop: usize, kind: &'static str, what: &str) -> Result<usize> {
    match usize::try_from(value) {
        Ok(number) if number < stop => Ok(number),
        _ => refuse(kind, format!("{what}: expected an integer in [0, {stop}), got {value}")),
    }
}

/// An object that the judge calls: a cache, a pool, or functions without state.
pub trait Object {
    /// Calls an operation: `"drop" => args.reply(self.drop(args.integer("sequence")?)?)`. Decline unknown names with `not_offered`.
    fn call(&mut self, operation: &str, args: &Args) -> Result<Json>;
}

/// A family that the program offers.
pub struct Family {
    pub name: &'static str,
    /// The arguments that an object is made with: "num_blocks >= 0", "block_size" (at least 1) or "dtype: format" (one of the formats).
    /// Other values return ConfigError before `make` is called.
    pub sizes: &'static [&'static str],
    pub layout: Layout,
    #[allow(clippy::type_complexity)]
    pub make: Box<dyn Fn(&Sizes) -> Result<Box<dyn Object>>>,
}

/// What the program says about itself.
pub struct About {
    pub name: &'static str,
    pub version: &'static str,
    /// "exact" if codes and scales have the bits that the specification defines, "tolerant" if they are within its bounds.
    pub level: &'static str,
    pub formats: Vec<&'static str>,
    /// Limits as JSON, `{"head_dim": [64, 128], "num_layers": {"most": 1}}`, or "".
    pub limits: &'static str,
}

/// The sizes, formats and options that an object is created with, by name.
pub struct Sizes(Json);

impl Sizes {
    pub fn size(&self, name: &str) -> usize {
        self.0.get(name).integer().and_then(|size| usize::try_from(size).ok()).unwrap_or(0)
    }

    pub fn text(&self, name: &str) -> &str {
        self.0.get(name).text()
    }

    /// An option that can be absent.
    pub fn number(&self, name: &str) -> Option<f64> {
        self.0.get(name).number()
    }
}

/// The arguments of a call. Shapes are checked against the sizes of the object; another axis has one length in the whole call.
pub struct Args<'a> {
    args: &'a Json,
    sizes: &'a Sizes,
    layout: Layout,
    lengths: RefCell<HashMap<String, usize>>,
    handed_out: RefCell<Option<(&'static str, Box<dyn Object>)>>,
}

impl Args<'_> {
    pub fn json(&self, name: &str) -> &Json {
        self.args.get(name)
    }

    /// All arguments, for an operation that accepts any.
    pub fn all(&self) -> &Json {
        self.args
    }

    pub fn integer(&self, name: &str) -> Result<i64> {
        self.json(name).integer().map_or_else(|| self.expected(name, "an integer"), Ok)
    }

    pub fn number(&self, name: &str) -> Result<f64> {
        self.json(name).number().map_or_else(|| self.expected(name, "a number"), Ok)
    }

    pub fn boolean(&self, name: &str) -> Result<bool> {
        match self.json(name) {
            Json::Bool(value) => Ok(*value),
            _ => self.expected(name, "a boolean"),
        }
    }

    pub fn text(&self, name: &str) -> Result<String> {
        Ok(self.json(name).text().to_string())
    }

    /// A list of integers, or an int64 array.
    pub fn integers(&self, name: &str) -> Result<Vec<i64>> {
        if let Json::Object(_) = self.json(name) {
            let Raw { dtype, bytes, .. } = self.raw(name)?;
            if dtype != "int64" {
                return refuse("DtypeMismatch", format!("{name}: expected int64, got {dtype}"));
            }
            return Ok(bytes.chunks_exact(8).map(|eight| i64::from_le_bytes(eight.try_into().unwrap())).collect());
        }
        let found: Option<Vec<i64>> = self.json(name).list().iter().map(Json::integer).collect();
        let found = found.map_or_else(|| self.expected(name, "a list of integers"), Ok)?;
        self.lengths.borrow_mut().entry(name.to_string()).or_insert(found.len());
        Ok(found)
    }

    pub fn numbers(&self, name: &str) -> Result<Vec<f64>> {
        let found: Option<Vec<f64>> = self.json(name).list().iter().map(Json::number).collect();
        found.map_or_else(|| self.expected(name, "a list of numbers"), Ok)
    }

    /// An array of any dtype. parameter: its name, or its name with axes, "store [num_slots, ...]".
    pub fn raw(&self, parameter: &str) -> Result<Raw> {
        let (name, axes) = arrays::split(parameter);
        let array = self.json(name);
        if !matches!(array.get("base64"), Json::String(_)) {
            return self.expected(name, "an array");
        }
        let array = Raw::received(array);
        if let Some(axes) = axes {
            self.check_shape(name, &axes, &array.shape)?;
        }
        Ok(array)
    }

    /// Float32 numbers, narrow floats widened. parameter: "keys [n, num_kv_heads, head_dim]". Errors: ShapeMismatch, DtypeMismatch.
    pub fn array(&self, parameter: &str) -> Result<Array> {
        let (name, axes) = arrays::split(parameter);
        let array = Array::widened(name, self.raw(parameter)?)?;
        let axes = axes.unwrap_or_default();
        let has_tokens = axes.len() >= 3 && axes[axes.len() - 3] != "num_layers";
        Ok(if self.layout == Layout::Hnd && has_tokens { array.swapped() } else { array })
    }

    /// An argument that can be absent or null: `args.optional("layers", Args::integers)`.
    pub fn optional<T>(&self, parameter: &str, read: impl Fn(&Self, &str) -> Result<T>) -> Result<Option<T>> {
        match self.json(arrays::split(parameter).0) {
            Json::Null => Ok(None),
            _ => read(self, parameter).map(Some),
        }
    }

    pub fn reply(&self, result: impl Reply) -> Result<Json> {
        Ok(result.reply(self.layout))
    }

    /// Replies with an object of another class, such as a buffer of a pool.
    pub fn hand_out(&self, class: &'static str, made: Box<dyn Object>) -> Result<Json> {
        *self.handed_out.borrow_mut() = Some((class, made));
        Ok(Json::Null)
    }

    fn expected<T>(&self, name: &str, what: &str) -> Result<T> {
        refuse("ConfigError", format!("{name}: expected {what}, got {}", self.json(name)))
    }

    fn check_shape(&self, name: &str, axes: &[&str], shape: &[usize]) -> Result<()> {
        let open = axes.last() == Some(&"...");
        let axes = &axes[..axes.len() - usize::from(open)];
        let mut lengths = self.lengths.borrow_mut();
        let mut fits = if open { shape.len() >= axes.len() } else { shape.len() == axes.len() };
        for (axis, length) in axes.iter().zip(shape) {
            fits = fits
                && match (axis.parse::<usize>(), self.sizes.0.get(axis).integer()) {
                    _ if axis.contains(' ') => true, // nope_dim + rope_dim
                    (Ok(fixed), _) => *length == fixed,
                    (_, Some(size)) => i64::try_from(*length) == Ok(size),
                    _ => *lengths.entry(axis.to_string()).or_insert(*length) == *length,
                };
        }
        if fits {
            return Ok(());
        }
        refuse("ShapeMismatch", format!("{name}: expected shape [{}], got {shape:?}", axes.join(", ")))
    }
}

/// A result that can be sent.
pub trait Reply {
    fn reply(self, layout: Layout) -> Json;
}

macro_rules! replies {
    ($($kind:ty: $value:ident => $json:expr;)*) => {
        $(impl Reply for $kind {
            fn reply(self, _: Layout) -> Json {
                let $value = self;
                $json
            }
        })*
    };
}

replies! {
    (): _unit => Json::Null;
    Json: value => value;
    bool: value => Json::Bool(value);
    i64: value => Json::Integer(value);
    usize: value => Json::Integer(value as i64);
    f64: value => Json::Number(value);
    &str: value => Json::from(value);
    String: value => Json::String(value);
    Raw: array => array.sent();
    Vec<i64>: values => Raw::integers(&values, vec![values.len()]).sent();
    Vec<Vec<i64>>: rows => Raw::integers(&rows.concat(), vec![rows.len(), rows.first().map_or(0, Vec::len)]).sent();
}

impl Reply for Array {
    fn reply(self, layout: Layout) -> Json {
        let array = if layout == Layout::Hnd && self.shape.len() >= 3 { self.swapped() } else { self };
        array.sent()
    }
}

impl<T: Reply> Reply for Option<T> {
    fn reply(self, layout: Layout) -> Json {
        self.map_or(Json::Null, |value| value.reply(layout))
    }
}

impl<A: Reply, B: Reply> Reply for (A, B) {
    fn reply(self, layout: Layout) -> Json {
        Json::List(vec![self.0.reply(layout), self.1.reply(layout)])
    }
}

impl<A: Reply, B: Reply, C: Reply> Reply for (A, B, C) {
    fn reply(self, layout: Layout) -> Json {
        Json::List(vec![self.0.reply(layout), self.1.reply(layout), self.2.reply(layout)])
    }
}

struct Live {
    class: &'static str,
    layout: Layout,
    sizes: Sizes,
    object: Box<dyn Object>,
}

/// Replies to every line of standard input until `bye` or the end of the input.
pub fn serve(about: &About, families: &[Family]) {
    let mut objects = HashMap::new();
    for line in io::stdin().lock().lines() {
        let request = Json::parse(&line.expect("standard input")).expect("a line of JSON");
        let id = request.get("id").clone();
        let reply = match perform(&request, about, families, &mut objects) {
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

/// objects: by the id of the request that created them.
fn perform(request: &Json, about: &About, families: &[Family], objects: &mut HashMap<i64, Live>) -> Result<Json> {
    let (op, args, id) = (request.get("op").text(), request.get("args"), request.get("id"));
    let (class, name) = op.split_once('.').unwrap_or((op, ""));
    let number = id.integer().unwrap_or(0);
    match op {
        "hello" => {
            objects.clear(); // a new sequence of calls starts
            return Ok(hello(about, families));
        }
        "bye" => return Ok(Json::Null),
        _ => {}
    }
    if name == "new" {
        let Some(family) = families.iter().find(|family| family.name == class) else {
            return not_offered(&format!("family {class}"));
        };
        check_sizes(about, family, args)?;
        let sizes = Sizes(args.clone());
        let object = (family.make)(&sizes)?;
        objects.insert(number, Live { class: family.name, layout: family.layout, sizes, object });
        return Ok(json::object([("handle", id.clone())]));
    }
    let Some(live) = request.get("on").integer().and_then(|on| objects.get_mut(&on)).filter(|live| live.class == class) else {
        return not_offered(op);
    };
    let Live { layout, sizes, object, .. } = live;
    let call = Args { args, sizes, layout: *layout, lengths: RefCell::default(), handed_out: RefCell::default() };
    let result = object.call(name, &call)?;
    let Some((class, object)) = call.handed_out.into_inner() else {
        return Ok(result);
    };
    let made = Live { class, layout: *layout, sizes: Sizes(sizes.0.clone()), object };
    objects.insert(number, made);
    Ok(json::object([("handle", id.clone())]))
}

fn hello(about: &About, families: &[Family]) -> Json {
    let texts = |texts: &[&str]| Json::List(texts.iter().map(|text| Json::from(*text)).collect());
    let names: Vec<&str> = families.iter().map(|family| family.name).collect();
    let mut fields = vec![
        ("name", about.name.into()),
        ("version", about.version.into()),
        ("language", "rust".into()),
        ("level", about.level.into()),
        ("formats", texts(&about.formats)),
        ("families", texts(&names)),
    ];
    if !about.limits.is_empty() {
        fields.push(("limits", Json::parse(about.limits).expect("limits as JSON")));
    }
    Json::Object(fields.into_iter().map(|(name, value)| (name.to_string(), value)).collect())
}

fn check_sizes(about: &About, family: &Family, args: &Json) -> Result<()> {
    let wrong = |name: &str, what: &str| refuse("ConfigError", format!("{name}: expected {what}, got {}", args.get(name)));
    for declared in family.sizes {
        if let Some((name, _)) = declared.split_once(':') {
            if !about.formats.contains(&args.get(name).text()) {
                return wrong(name, "a supported format");
            }
            continue;
        }
        let (name, least) = declared.strip_suffix(" >= 0").map_or((*declared, 1), |name| (name, 0));
        if args.get(name).integer().is_none_or(|size| size < least) {
            return wrong(name, &format!("an integer of at least {least}"));
        }
    }
    if let Json::Object(fields) = args {
        if let Some((name, _)) = fields.iter().find(|(_, value)| *value.get("handle") != Json::Null) {
            return not_offered(&format!("{name}: an object as an argument"));
        }
    }
    Ok(())
}
