// Arrays of the protocol, {"dtype", "shape", "base64"} in little-endian C order, and stores: typed arrays of numbers for float32,
// of 16-bit codes for float16 and bfloat16.

import { KVError } from "./protocol.mjs";

// Number of exponent bits, number of mantissa bits.
const SMALL = { float16: [5, 10], bfloat16: [8, 7] };

const buffer = new ArrayBuffer(4);
const asFloat = new Float32Array(buffer);
const asBits = new Uint32Array(buffer);

/** Convert a float32 to the code of a small float: nearest, ties to even, infinity above the largest number; NaN stays NaN. */
export function encode(value, dtype) {
  const [exponentBits, mantissaBits] = SMALL[dtype];
  const least = 2 - 2 ** (exponentBits - 1); // the exponent of the subnormals
  const one = 2 ** mantissaBits;
  const infinity = (2 ** exponentBits - 1) * one;
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
  if (Number.isNaN(value)) return infinity + one / 2;
  if (!Number.isFinite(value)) return sign + infinity;
  asFloat[0] = value;
  const exponent = Math.max(((asBits[0] >>> 23) & 255) - 127, least);
  const steps = roundHalfEven(Math.abs(value) / 2 ** (exponent - mantissaBits)); // exact, because both are float64
  return sign + Math.min((exponent - least) * one + steps, infinity); // a carry increments the exponent
}

/** Convert a code to its number. */
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

function roundHalfEven(x) {
  const down = Math.floor(x);
  const rest = x - down;
  return rest > 0.5 || (rest === 0.5 && down % 2 === 1) ? down + 1 : down;
}

/** Return a store of `size` zeros in a dtype. */
export function zeros(size, dtype) {
  return dtype === "float32" ? new Float32Array(size) : new Uint16Array(size);
}

/** Copy float32 numbers into a store of a dtype. */
export function put(store, at, numbers, dtype) {
  if (dtype === "float32") store.set(numbers, at);
  else numbers.forEach((number, i) => (store[at + i] = encode(number, dtype)));
}

/** Return a store's numbers as float32. */
export function widened(store, dtype) {
  return dtype === "float32" ? store : Float32Array.from(store, (code) => decode(code, dtype));
}

/** Return a typed array as the protocol encodes it. */
export function sent(store, shape, dtype = "float32") {
  return { dtype, shape, base64: Buffer.from(store.buffer, store.byteOffset, store.byteLength).toString("base64") };
}

/**
 * Decode an array of the protocol to float32 numbers and a shape, narrow floats widened. `shape` has null for an axis of any length.
 * Throws ShapeMismatch, and DtypeMismatch for other dtypes (FMT-LEVEL-04).
 */
export function received(name, array, shape) {
  const [got, wanted] = [array?.shape ?? [], shape.map((axis) => axis ?? "n")];
  if (got.length !== shape.length || shape.some((axis, i) => axis !== null && axis !== got[i])) {
    throw new KVError("ShapeMismatch", `${name}: expected shape [${wanted}], got [${got}]`);
  }
  const bytes = new Uint8Array(Buffer.from(array.base64, "base64")).buffer; // a copy, aligned
  if (array.dtype === "float32") return { numbers: new Float32Array(bytes), shape: got };
  if (array.dtype in SMALL) return { numbers: widened(new Uint16Array(bytes), array.dtype), shape: got };
  throw new KVError("DtypeMismatch", `${name}: expected float32, float16 or bfloat16, got ${array.dtype}`);
}

/** Throw an error of this kind unless `value` is an integer >= `least`. */
export function whole(name, value, least, kind) {
  if (!Number.isInteger(value) || value < least) {
    throw new KVError(kind, `${name}: expected an integer of at least ${least}, got ${JSON.stringify(value)}`);
  }
}
