// Stores: typed arrays of numbers for float32, of 16-bit codes for float16 and bfloat16.

import { bytesOf, decode, Raw } from "./sdk/index.mjs";

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

/** Return a store as an array of its dtype. */
export function stored(store, shape, dtype) {
  return new Raw(dtype, shape, bytesOf(store));
}
