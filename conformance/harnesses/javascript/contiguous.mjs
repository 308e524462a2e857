// The contiguous cache: one growing buffer each for keys and values, [batch, heads, capacity, head_dim].

import { KVError, Tensor, whole } from "./sdk/index.mjs";
import { put, stored, widened, zeros } from "./stores.mjs";

export class ContiguousCache {
  constructor({ batch_size, num_kv_heads, head_dim, initial_capacity, max_seq_len, dtype }) {
    Object.assign(this, { batch_size, num_kv_heads, head_dim, max_seq_len, dtype });
    this.seq_len = 0;
    this.capacity = Math.min(initial_capacity, max_seq_len);
    [this.keys, this.values] = [this.#memory(this.capacity), this.#memory(this.capacity)];
  }

  /** Append n tokens, keys and values [batch, heads, n, head_dim]. */
  append(keys, values) {
    this.#store(keys.numbers, values.numbers, keys.shape[2]);
  }

  /** Like append, from one array [2, batch, heads, n, head_dim], keys first. */
  append_fused(key_values) {
    const { numbers, shape } = key_values;
    const half = numbers.length / 2;
    this.#store(numbers.subarray(0, half), numbers.subarray(half), shape[3]);
  }

  read() {
    return [this.#read(this.keys), this.#read(this.values)];
  }

  /** The two buffers, in the cache's dtype. */
  raw() {
    const shape = [this.batch_size, this.num_kv_heads, this.capacity, this.head_dim];
    return [this.keys, this.values].map((store) => stored(store, shape, this.dtype));
  }

  /** Add tokens that the caller wrote into the raw buffers to the length. */
  advance(count) {
    whole("count", count, 0, "PositionOutOfRange");
    if (this.seq_len + count > this.capacity) {
      throw new KVError("CapacityExceeded", `advance: ${this.seq_len + count} tokens needed, capacity is ${this.capacity}`);
    }
    this.seq_len += count;
  }

  reset() {
    this.seq_len = 0;
  }

  #store(keys, values, count) {
    const needed = this.seq_len + count;
    if (needed > this.max_seq_len) {
      throw new KVError("CapacityExceeded", `cache full: ${needed} tokens needed, max_seq_len is ${this.max_seq_len}`);
    }
    if (needed > this.capacity) this.#grow(needed);
    for (const [store, numbers] of [[this.keys, keys], [this.values, values]]) {
      this.#rows((row, lane) => {
        const tokens = numbers.subarray(lane * count * this.head_dim, (lane + 1) * count * this.head_dim);
        put(store, (row + this.seq_len) * this.head_dim, tokens, this.dtype);
      });
    }
    this.seq_len = needed;
  }

  /** Double the capacity, from at least 1, until the tokens fit. */
  #grow(needed) {
    let capacity = Math.max(this.capacity, 1);
    while (capacity < needed) capacity *= 2;
    capacity = Math.min(capacity, this.max_seq_len);
    const used = this.seq_len * this.head_dim;
    [this.keys, this.values] = [this.keys, this.values].map((old) => {
      const store = this.#memory(capacity);
      this.#rows((row, lane) => {
        const from = row * this.head_dim;
        store.set(old.subarray(from, from + used), lane * capacity * this.head_dim);
      });
      return store;
    });
    this.capacity = capacity;
  }

  #read(store) {
    const used = this.seq_len * this.head_dim;
    const tokens = zeros(this.batch_size * this.num_kv_heads * used, this.dtype);
    this.#rows((row, lane) => {
      const from = row * this.head_dim;
      tokens.set(store.subarray(from, from + used), lane * used);
    });
    return new Tensor([this.batch_size, this.num_kv_heads, this.seq_len, this.head_dim], widened(tokens, this.dtype));
  }

  /** Visit each row (sequence and head): the index of its first token in the buffers, and its number. */
  #rows(visit) {
    for (let lane = 0; lane < this.batch_size * this.num_kv_heads; lane++) visit(lane * this.capacity, lane);
  }

  #memory(capacity) {
    return zeros(this.batch_size * this.num_kv_heads * capacity * this.head_dim, this.dtype);
  }
}
