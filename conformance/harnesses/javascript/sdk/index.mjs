// The SDK of kvref for caches in JavaScript, without dependencies. It reads requests from standard input, converts them to calls of your
// class, and writes the replies (kvref/spec/protocol.md):
//
//     serve({
//       about: { name: "mycache", version: "0.1", level: "exact", formats: ["float32"] },
//       families: {
//         blocks: {
//           make: (sizes) => new MyPool(sizes),
//           sizes: ["num_blocks >= 0"],
//           operations: { num_free: [], free: ["block"] },
//         },
//       },
//     });
//
// An operation is a method or an attribute, with the parameters of the method in order. The parameters decide how arguments are read:
//
//     "layer"                              a number, a string, a boolean, a list, or undefined if an optional argument is absent;
//                                          an integer beyond 2 ** 53 is a BigInt; an int64 array is a list
//     "keys [n, num_kv_heads, head_dim]"   a Tensor of this shape; float16 and bfloat16 are widened. An axis with the name of a size of the
//                                          object has this length, and another name has one length in the whole call
//     "raw codes"                          an array of any dtype, as bytes (Raw)
//     "..."                                all arguments, as an object
//
// Results: undefined, numbers, strings, Tensor, Raw, lists of integers, lists of results, and objects with numbers by name.

import { createInterface } from "node:readline";

/** The error that a cache throws. `kind` is one of the specification's error names. An operation that throws must change nothing. */
export class KVError extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

/** Decline an operation. It counts as neither passed nor failed. */
export function notOffered(why) {
  throw new KVError("NotOffered", why);
}

/** Throw an error of this kind unless `value` is an integer >= `least`. */
export function whole(name, value, least, kind) {
  if (!Number.isInteger(value) || value < least) {
    throw new KVError(kind, `${name}: expected an integer of at least ${least}, got ${JSON.stringify(value)}`);
  }
}

/** Float32 numbers in C order. */
export class Tensor {
  constructor(shape, numbers) {
    Object.assign(this, { shape, numbers });
  }
}

/** An array of any dtype: bytes in a Uint8Array, little-endian and in C order. */
export class Raw {
  constructor(dtype, shape, bytes) {
    Object.assign(this, { dtype, shape, bytes });
  }
}

/** Return an int64 array, such as the block tables of several sequences. A list of integers needs no conversion. */
export function int64(values, shape = [values.length]) {
  return new Raw("int64", shape, bytesOf(BigInt64Array.from(values, BigInt)));
}

/** Return the bytes of a typed array, without a copy. */
export function bytesOf(typed) {
  return new Uint8Array(typed.buffer, typed.byteOffset, typed.byteLength);
}

// Number of exponent bits, number of mantissa bits.
const SMALL = { float16: [5, 10], bfloat16: [8, 7] };

/** Convert a float16 or bfloat16 code to its number. */
export function decode(code, dtype) {
  const [exponentBits, mantissaBits] = SMALL[dtype];
  const one = 2 ** mantissaBits;
  const sign = code & 0x8000 ? -1 : 1;
  const exponent = (code & 0x7fff) >> mantissaBits;
  const mantissa = code & (one - 1);
  if (exponent === 2 ** exponentBits - 1) return mantissa ? NaN : sign * Infinity;
  const unit = 2 ** (Math.max(exponent, 1) + 1 - 2 ** (exponentBits - 1) - mantissaBits);
  return sign * (mantissa + (exponent ? one : 0)) * unit;
}

/**
 * Reply to every line of standard input until `bye` or the end of the input.
 *
 * sizes of a family: "num_blocks >= 0", "block_size" (at least 1) or "dtype: format" (one of the formats); other values throw ConfigError
 * before `make` is called. layout: "HND" if your keys and values are [heads, tokens, head_dim]; the judge uses "NHD".
 * handedOut: the classes of objects that operations return, { buffer: { of: Buffer, operations } }.
 */
export function serve({ about, families, handedOut = {} }) {
  const objects = new Map(); // by the id of the request that created them
  const lines = createInterface({ input: process.stdin });
  const classes = { ...families, ...handedOut };

  function perform({ id, op, on, args }) {
    if (op === "hello") {
      objects.clear(); // a new sequence of calls starts
      return { ...about, language: "javascript", families: Object.keys(families) };
    }
    if (op === "bye") {
      lines.close();
      return null;
    }
    const [family, name] = op.split(".");
    const { make, sizes = [], operations = {}, layout = "NHD" } = classes[family] ?? {};
    if (name === "new" && make) {
      checkSizes(sizes, args, about.formats);
      objects.set(id, { family, sizes: args, self: make(args) });
      return { handle: id };
    }
    const object = objects.get(on);
    if (object?.family !== family || !Object.hasOwn(operations, name)) notOffered(op);
    const call = { args, sizes: object.sizes, layout, lengths: new Map() };
    const given = operations[name].map((parameter) => argument(parameter, call));
    const { self } = object;
    const result = typeof self[name] === "function" ? self[name](...given) : self[name];
    const [made] = Object.entries(handedOut).find(([, { of }]) => result instanceof of) ?? [];
    if (!made) return sent(result, layout);
    objects.set(id, { family: made, sizes: object.sizes, self: result });
    return { handle: id };
  }

  lines.on("line", (line) => {
    const request = parsed(line);
    let reply;
    try {
      reply = { id: request.id, ok: perform(request) };
    } catch (error) {
      reply = { id: request.id, error: { kind: error.kind ?? error.name, message: error.message } };
    }
    process.stdout.write(JSON.stringify(reply) + "\n");
  });
}

/** Parse JSON. Integers beyond 2 ** 53 become BigInts. */
function parsed(line) {
  if (!/\d{16}/.test(line)) return JSON.parse(line);
  const marked = line.replace(/"(?:[^"\\]|\\.)*"|-?\d{16,}(?![\d.eE])/g, (text) => (text[0] === '"' ? text : `{"bigint":"${text}"}`));
  const revive = (_, value) => {
    if (typeof value?.bigint !== "string") return value;
    return Number.isSafeInteger(Number(value.bigint)) ? Number(value.bigint) : BigInt(value.bigint);
  };
  return JSON.parse(marked, revive);
}

function checkSizes(sizes, args, formats) {
  for (const declared of sizes) {
    const [name] = declared.split(/[ :]/);
    if (!declared.includes(":")) whole(name, args[name], declared.endsWith(">= 0") ? 0 : 1, "ConfigError");
    else if (!formats.includes(args[name])) {
      throw new KVError("ConfigError", `${name}: expected one of ${formats}, got ${JSON.stringify(args[name])}`);
    }
  }
  const [object] = Object.entries(args).find(([, value]) => value?.handle !== undefined) ?? [];
  if (object) notOffered(`${object}: an object as an argument`);
}

function argument(parameter, call) {
  if (parameter === "...") return call.args;
  const [, raw, name, text] = parameter.match(/^(raw )?(\w+)(?: \[(.*)\])?$/);
  const axes = text?.split(",").map((axis) => axis.trim());
  const value = call.args[name];
  if (value === null || value === undefined) return undefined;
  if (typeof value.number === "string") return Number(value.number.replace("nan", "NaN").replace("inf", "Infinity"));
  if (Array.isArray(value)) call.lengths.set(name, value.length);
  if (typeof value.base64 !== "string") return value;
  if (axes) checkShape(name, axes, value.shape, call);
  const bytes = new Uint8Array(Buffer.from(value.base64, "base64")); // a copy, aligned
  if (raw) return new Raw(value.dtype, value.shape, bytes);
  if (!axes && value.dtype === "int64") return Array.from(new BigInt64Array(bytes.buffer), Number);
  const tensor = new Tensor(value.shape, floats(name, value.dtype, bytes.buffer));
  return call.layout === "HND" && axes.length >= 3 && axes.at(-3) !== "num_layers" ? swapped(tensor) : tensor;
}

function checkShape(name, axes, shape, { sizes, lengths }) {
  const open = axes.at(-1) === "...";
  const fixed = open ? axes.slice(0, -1) : axes;
  const fits = (axis, length) => {
    if (axis.includes(" ")) return true; // nope_dim + rope_dim
    const known = /^\d+$/.test(axis) ? Number(axis) : (sizes[axis] ?? lengths.get(axis));
    if (known === undefined) lengths.set(axis, length);
    return known === undefined || known === length;
  };
  if ((open ? shape.length < fixed.length : shape.length !== fixed.length) || !fixed.every((axis, i) => fits(axis, shape[i]))) {
    throw new KVError("ShapeMismatch", `${name}: expected shape [${axes.join(", ")}], got [${shape.join(", ")}]`);
  }
}

function floats(name, dtype, buffer) {
  if (dtype === "float32") return new Float32Array(buffer);
  if (dtype in SMALL) return Float32Array.from(new Uint16Array(buffer), (code) => decode(code, dtype));
  throw new KVError("DtypeMismatch", `${name}: expected float32, float16 or bfloat16, got ${dtype}`);
}

/** The tensor with its axes -3 and -2 exchanged. */
function swapped({ shape, numbers }) {
  const [outer, inner, row] = shape.slice(-3);
  const result = new Float32Array(numbers.length);
  const plane = outer * inner * row;
  for (let base = 0; base < numbers.length; base += plane) {
    for (let i = 0; i < outer; i++) {
      for (let j = 0; j < inner; j++) {
        const from = base + (i * inner + j) * row;
        result.set(numbers.subarray(from, from + row), base + (j * outer + i) * row);
      }
    }
  }
  return new Tensor([...shape.slice(0, -3), inner, outer, row], result);
}

/** A result as the protocol encodes it. */
function sent(result, layout) {
  if (result instanceof Tensor) {
    const { shape, numbers } = layout === "HND" && result.shape.length >= 3 ? swapped(result) : result;
    return sent(new Raw("float32", shape, bytesOf(Float32Array.from(numbers))), layout);
  }
  if (result instanceof Raw) {
    const { buffer, byteOffset, byteLength } = result.bytes;
    return { dtype: result.dtype, shape: result.shape, base64: Buffer.from(buffer, byteOffset, byteLength).toString("base64") };
  }
  const integers = Array.isArray(result) && result.every((value) => typeof value === "number" || typeof value === "bigint");
  if (integers) return sent(int64(result), layout);
  if (Array.isArray(result)) return result.map((part) => sent(part, layout));
  if (typeof result === "bigint") return Number(result);
  if (typeof result === "number" && !Number.isFinite(result)) return { number: String(result).toLowerCase().replace("infinity", "inf") };
  return result ?? null;
}
