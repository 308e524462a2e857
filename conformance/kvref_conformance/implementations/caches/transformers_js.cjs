// transformers.js' DynamicCache and Tensor, offered to kvref over a pipe (kvref/spec/protocol.md): `node transformers_js.cjs FAMILY`.
// A CommonJS file, for NODE_PATH is heeded in those alone.

const { join } = require("node:path");
const { createInterface } = require("node:readline");
const { DynamicCache, Tensor, cat, stack } = require("@huggingface/transformers");

const PACKAGE = require(join(require.resolve("@huggingface/transformers"), "../../package.json"));
const ABOUT = { version: PACKAGE.version, language: "javascript", level: "exact" };
const [KEY, VALUE] = ["past_key_values.0.key", "past_key_values.0.value"];
const TOKENS = 2; // the axis: [batch, heads, tokens, head_dim]
const ARRAYS = { float32: Float32Array, float64: Float64Array, float16: Uint16Array, uint8: Uint8Array, uint16: Uint16Array };

class Refusal extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

/** What came over the wire as a Tensor, which has every dtype of the wire but bfloat16. */
function tensor({ dtype, shape, base64 }) {
  if (!(dtype in ARRAYS)) throw new Refusal("NotOffered", `a Tensor of ${dtype}`);
  const bytes = new Uint8Array(Buffer.from(base64, "base64")); // a copy, aligned
  return new Tensor(dtype, new ARRAYS[dtype](bytes.buffer), shape);
}

function sent({ data, type, dims }) {
  return { dtype: type, shape: [...dims], base64: Buffer.from(data.buffer, data.byteOffset, data.byteLength).toString("base64") };
}

/** A DynamicCache of one layer. Its graph gives it all tokens after a step; here `cat` does, as whoever joins caches has it. */
class OneLayer {
  constructor(config) {
    for (const [name, value] of Object.entries(config)) {
      const least = name === "initial_capacity" ? 0 : 1;
      const good = name === "dtype" ? value === "float32" : Number.isInteger(value) && value >= least;
      if (!good) throw new Refusal("NotOffered", `a cache that is given its ${name}`);
    }
    const { batch_size, num_kv_heads, head_dim, max_seq_len } = config;
    this.longest = max_seq_len; // what the judge takes for the maximum
    const none = () => new Tensor("float32", new Float32Array(0), [batch_size, num_kv_heads, 0, head_dim]);
    this.cache = new DynamicCache({ [KEY]: none(), [VALUE]: none() }); // as addPastKeyValues begins one
  }

  seq_len() {
    return this.cache.get_seq_length();
  }

  append({ keys, values }) {
    if (keys.shape.length === 4 && this.seq_len() + keys.shape[TOKENS] > this.longest) {
      throw new Refusal("NotOffered", "a maximum length");
    }
    const more = { [KEY]: tensor(keys), [VALUE]: tensor(values) };
    this.changed((old, name) => cat([old, more[name]], TOKENS), "ShapeMismatch");
  }

  read() {
    return [sent(this.cache[KEY]), sent(this.cache[VALUE])];
  }

  truncate({ length }) {
    const there = this.seq_len();
    if (!(length >= 0 && length <= there)) throw new Refusal("NotOffered", "a length that is not there: slice clamps, as arrays do");
    this.changed((old) => old.slice(null, null, [0, length]), "PositionOutOfRange");
  }

  reorder({ rows }) {
    if (!rows.length || rows.some((row) => row < 0)) throw new Refusal("NotOffered", "no rows, and those counted from the end");
    this.changed((old) => stack(rows.map((row) => old[row])), "RowOutOfRange");
  }

  /** What was computed of keys and values is handed over as a graph's outputs are: both, or neither. */
  changed(compute, kind) {
    const entries = {};
    try {
      for (const name of [KEY, VALUE]) entries[name] = compute(this.cache[name], name);
    } catch (error) {
      throw new Refusal(kind, error.message);
    }
    this.cache.update(entries);
  }
}

/** Tensor.to, to float16 and back. */
class Casts {
  encode({ values, format }) {
    const { data, dims } = tensor(values).to(format);
    return sent({ data: new Uint16Array(data.buffer, data.byteOffset, data.length), type: "uint16", dims });
  }

  decode({ codes, format }) {
    return sent(tensor({ ...codes, dtype: format }).to("float32"));
  }
}

const FAMILIES = {
  contiguous: { made: (config) => new OneLayer(config), about: { name: "transformers.js-dynamic", formats: ["float32"] } },
  elements: { made: () => new Casts(), about: { name: "transformers.js-casts", formats: ["float16"] } },
};
const FAMILY = process.argv[2];
const objects = new Map(); // by the id of the request that made them
const lines = createInterface({ input: process.stdin });

function perform({ id, op, on, args }) {
  if (op === "hello") {
    objects.clear();
    return { ...ABOUT, ...FAMILIES[FAMILY].about, families: [FAMILY] };
  }
  if (op === "bye") {
    lines.close();
    return null;
  }
  const name = op.split(".")[1];
  if (name === "new") {
    objects.set(id, FAMILIES[FAMILY].made(args));
    return { handle: id };
  }
  const object = objects.get(on);
  if (typeof object[name] !== "function") throw new Refusal("NotOffered", op);
  return object[name](args) ?? null;
}

lines.on("line", (line) => {
  const request = JSON.parse(line);
  let reply;
  try {
    reply = { id: request.id, ok: perform(request) };
  } catch (error) {
    reply = { id: request.id, error: { kind: error.kind ?? error.name, message: error.message } };
  }
  process.stdout.write(JSON.stringify(reply) + "\n");
});
