// The windowed cache: the sink tokens, which are never overwritten, and the last tokens in a ring buffer.

import { KVError, Tensor, whole } from "./sdk/index.mjs";
import { put, widened, zeros } from "./stores.mjs";

export class WindowedCache {
  constructor({ num_kv_heads, head_dim, window, sinks, chunk, rollback, dtype }) {
    Object.assign(this, { num_kv_heads, head_dim, window, sinks, chunk, dtype });
    this.ring = window + rollback;
    this.length = 0;
    this.first = sinks; // the oldest position in the ring that is not overwritten
    this.width = num_kv_heads * head_dim;
    [this.keys, this.values] = [0, 1].map(() => zeros((sinks + this.ring) * this.width, dtype));
  }

  get stored_tokens() {
    return Math.min(this.sinks, this.length) + Math.max(0, this.length - this.first);
  }

  append(keys, values) {
    this.#write(keys.numbers, values.numbers, keys.shape[0]);
  }

  /** Append tokens and attend with one query per token. Token by token, because a later token can overwrite one that an earlier query sees. */
  step(query, keys, values, scale) {
    const count = keys.shape[0];
    this.#checkQuery(query, count);
    const rows = query.numbers.length / Math.max(1, count);
    const out = new Float32Array(query.numbers.length);
    for (let i = 0; i < count; i++) {
      const token = [keys, values].map(({ numbers }) => numbers.subarray(i * this.width, (i + 1) * this.width));
      this.#write(...token, 1);
      this.#attend(query.numbers.subarray(i * rows, (i + 1) * rows), this.#seen(this.length - 1), scale, out.subarray(i * rows));
    }
    return new Tensor(query.shape, out);
  }

  /** Attend with queries that are all at the position of the newest token. */
  attend(query, scale) {
    this.#checkQuery(query, query.shape[0]);
    const first = this.#firstSeen(this.length - 1);
    if (first < this.first && first < this.length) {
      throw new KVError("PositionOutOfRange", `attend: position ${first} is not stored, the oldest one in the ring is ${this.first}`);
    }
    const rows = query.numbers.length / Math.max(1, query.shape[0]);
    const out = new Float32Array(query.numbers.length);
    for (let at = 0; at < out.length; at += rows) {
      this.#attend(query.numbers.subarray(at, at + rows), this.#seen(this.length - 1), scale, out.subarray(at));
    }
    return new Tensor(query.shape, out);
  }

  read(positions) {
    for (const position of positions) {
      whole("position", position, 0, "PositionOutOfRange");
      const held = position < this.length && (position < this.sinks || position >= this.first);
      if (!held) throw new KVError("PositionOutOfRange", `position ${position} is not stored`);
    }
    return [this.keys, this.values].map((store) => {
      const read = new Float32Array(positions.length * this.width);
      positions.forEach((position, i) => read.set(this.#token(store, position), i * this.width));
      return new Tensor([positions.length, this.num_kv_heads, this.head_dim], read);
    });
  }

  truncate(length) {
    whole("length", length, 0, "PositionOutOfRange");
    if (length > this.length) throw new KVError("PositionOutOfRange", `length: expected at most ${this.length}, got ${length}`);
    if (this.#firstSeen(length) < Math.min(this.first, length)) {
      throw new KVError("NotTruncatable", `cannot truncate to ${length}: position ${this.#firstSeen(length)} is not stored`);
    }
    this.length = length;
    this.first = Math.min(this.first, Math.max(this.sinks, length));
  }

  clear() {
    this.truncate(0);
  }

  /** The first position after the sink tokens that a query sees. */
  #firstSeen(query) {
    const chunk = this.chunk ? Math.floor(query / this.chunk) * this.chunk : 0;
    return Math.max(this.sinks, query - this.window + 1, chunk);
  }

  #seen(query) {
    const seen = [];
    for (let at = 0; at < Math.min(this.sinks, query + 1); at++) seen.push(at);
    for (let at = this.#firstSeen(query); at <= query; at++) seen.push(at);
    return seen;
  }

  #slot(position) {
    return position < this.sinks ? position : this.sinks + ((position - this.sinks) % this.ring);
  }

  #token(store, position) {
    const slot = this.#slot(position);
    return widened(store.subarray(slot * this.width, (slot + 1) * this.width), this.dtype);
  }

  #checkQuery({ shape }, count) {
    if (shape[0] !== count || shape[1] % this.num_kv_heads) {
      const wanted = `[${count}, a multiple of ${this.num_kv_heads}, ${this.head_dim}]`;
      throw new KVError("ShapeMismatch", `query: expected shape ${wanted}, got [${shape.join(", ")}]`);
    }
  }

  #write(keys, values, count) {
    for (let i = 0; i < count; i++) {
      const slot = this.#slot(this.length + i);
      for (const [store, numbers] of [[this.keys, keys], [this.values, values]]) {
        put(store, slot * this.width, numbers.subarray(i * this.width, (i + 1) * this.width), this.dtype);
      }
    }
    this.length += count;
    this.first = Math.max(this.first, this.length - this.ring);
  }

  /** Write softmax(scale q k') v of one token's query heads over these positions into `out`. */
  #attend(query, positions, scale, out) {
    const keys = positions.map((position) => this.#token(this.keys, position));
    const values = positions.map((position) => this.#token(this.values, position));
    const [dim, heads] = [this.head_dim, query.length / this.head_dim];
    for (let head = 0; head < heads && positions.length; head++) {
      const from = Math.floor((head * this.num_kv_heads) / heads) * dim; // the first number of its KV head
      const scores = keys.map((key) => {
        let sum = 0;
        for (let d = 0; d < dim; d++) sum += query[head * dim + d] * key[from + d];
        return scale * sum;
      });
      const largest = Math.max(...scores);
      const weights = scores.map((score) => Math.exp(score - largest));
      const total = weights.reduce((sum, weight) => sum + weight, 0);
      for (let d = 0; d < dim; d++) {
        let sum = 0;
        values.forEach((value, i) => (sum += weights[i] * value[from + d]));
        out[head * dim + d] = sum / total;
      }
    }
  }
}
