// The buffer pool: buffers in five sizes, which are kept for reuse after their release.

import { KVError, Tensor, whole } from "./sdk/index.mjs";

const SIZES = [1, 4, 16, 64, 256].map((kib) => kib * 1024); // bytes

export class BufferPool {
  #free = new Map(SIZES.map((size) => [size, []]));
  #counts = { hits: 0, misses: 0, allocations: 0, returns: 0, drops: 0 };

  constructor({ max_buffers }, { releasesTwice = false } = {}) {
    whole("max_buffers", max_buffers, 1, "ConfigError");
    this.max_buffers = max_buffers;
    this.releasesTwice = releasesTwice; // the bug
  }

  /** Return an empty buffer of the smallest size that is at least `num_bytes`. */
  acquire(num_bytes) {
    whole("num_bytes", num_bytes, 0, "PositionOutOfRange");
    const size = SIZES.find((size) => num_bytes <= size);
    if (size === undefined) {
      throw new KVError("BufferTooLarge", `acquire: expected at most ${SIZES.at(-1)} bytes, got ${num_bytes}`);
    }
    const free = this.#free.get(size);
    this.#counts[free.length ? "hits" : "misses"]++;
    return new Buffer(this, free.pop() ?? this.#allocate(size));
  }

  /** Add `count` buffers to the free list of one size, up to max_buffers. */
  prewarm(size, count) {
    if (!SIZES.includes(size)) throw new KVError("ConfigError", `size: expected one of ${SIZES}, got ${JSON.stringify(size)}`);
    whole("count", count, 0, "PositionOutOfRange");
    const free = this.#free.get(size);
    for (let i = Math.min(count, this.max_buffers - free.length); i > 0; i--) free.push(this.#allocate(size));
  }

  /** Drop all free buffers. */
  clear() {
    for (const free of this.#free.values()) free.length = 0;
  }

  stats() {
    const { hits, misses } = this.#counts;
    const free = Object.fromEntries([...this.#free].map(([size, buffers]) => [size, buffers.length]));
    return { ...this.#counts, hit_rate: hits + misses ? hits / (hits + misses) : 0, free };
  }

  /** Return memory to the pool. Buffer.release calls this once per buffer. */
  takeBack(memory) {
    this.#counts.returns++;
    const free = this.#free.get(memory.byteLength);
    if (free.length < this.max_buffers) free.push(memory);
    else this.#counts.drops++;
  }

  #allocate(size) {
    this.#counts.allocations++;
    return new Float32Array(size / 4);
  }
}

/** A buffer of `capacity` float32 values, of which `length` are written. */
export class Buffer {
  #pool;
  #memory;
  #released = false;
  length = 0;

  constructor(pool, memory) {
    this.#pool = pool;
    this.#memory = memory;
    this.size = memory.byteLength;
    this.capacity = memory.length;
  }

  extend(values) {
    this.#mustBeHeld();
    const { numbers } = values;
    if (this.length + numbers.length > this.capacity) {
      const got = this.length + numbers.length;
      throw new KVError("CapacityExceeded", `buffer full: ${got} values needed, capacity is ${this.capacity}`);
    }
    this.#memory.set(numbers, this.length);
    this.length += numbers.length;
  }

  /** The written values, never those of an earlier owner. */
  values() {
    this.#mustBeHeld();
    return new Tensor([this.length], this.#memory.subarray(0, this.length));
  }

  clear() {
    this.#mustBeHeld();
    this.length = 0;
  }

  /** Return the memory to the pool. A second release does nothing. */
  release() {
    if (this.#released && !this.#pool.releasesTwice) return;
    this.#released = true;
    this.#pool.takeBack(this.#memory);
  }

  #mustBeHeld() {
    if (this.#released) throw new KVError("BufferReleased", "the buffer was already released");
  }
}
