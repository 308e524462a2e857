// transformers.js' DynamicCache and Tensor, as a harness that kvref calls over a pipe (kvref/spec/protocol.md): `node transformers_js.cjs FAMILY`.
// A CommonJS file, because Node uses NODE_PATH only for these.

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

/** Decode an array of the protocol to a Tensor, which has every dtype of the protocol except bfloat16. */
function tensor({ dtype, shape, base64 }) {
  if (!(dtype in ARRAYS)) throw new Refusal("NotOffered", `a Tensor of ${dtype}`);
  const bytes = new Uint8Array(Buffer.from(base64, "base64")); // a copy, aligned
  return new Tensor(dtype, new ARRAYS[dtype](bytes.buffer), shape);
}

function sent({ data, type, dims }) {
  return { dtype: type, shape: [...dims], base64: Buffer.from(data.buffer, data.byteOffset, data.byteLength).toString("base64") };
}

/** A DynamicCache of one layer. A model's graph returns all tokens after a step; here `cat` concatenates old and new tokens. */
class OneLayer {
  constructor(config) {
    for (const [name, value] of Object.entries(config)) {
      const least = name === "initial_capacity" ? 0 : 1;
      const good = name === "dtype" ? value === "float32" : Number.isInteger(value) && value >= least;
      if (!good) throw new Refusal("NotOffered", `validation of ${name}, which the library does not take as an argument`);
    }
    const { batch_size, num_kv_heads, head_dim, max_seq_len } = config;
    this.longest = max_seq_len; // the judge's maximum length
    const none = () => new Tensor("float32", new Float32Array(0), [batch_size, num_kv_heads, 0, head_dim]);
    this.cache = new DynamicCache({ [KEY]: none(), [VALUE]: none() }); // as in addPastKeyValues
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
    if (!(length >= 0 && length <= there)) throw new Refusal("NotOffered", "rejecting a length out of range: slice clamps, like arrays");
    this.changed((old) => old.slice(null, null, [0, length]), "PositionOutOfRange");
  }

  reorder({ rows }) {
    if (!rows.length || rows.some((row) => row < 0)) throw new Refusal("NotOffered", "rejecting negative rows, or no rows");
    this.changed((old) => stack(rows.map((row) => old[row])), "RowOutOfRange");
  }

  /** Store new keys and values like the outputs of a graph: both, or neither. */
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

/** Casts with Tensor.to, to float16 and back. */
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
const objects = new Map(); // by the id of the request that created them
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
