// A harness in JavaScript without dependencies: a contiguous and a windowed KV cache and a buffer pool, which kvref calls:
//
//     kvref check --exec "node conformance/harnesses/javascript/harness.mjs"
//
// --bug release-twice: a buffer that is released twice is added to the free list twice and then gets two owners.

import { Buffer, BufferPool } from "./buffers.mjs";
import { ContiguousCache } from "./contiguous.mjs";
import { serve } from "./sdk/index.mjs";
import { WindowedCache } from "./windowed.mjs";

const BUGS = ["release-twice"];

const options = process.argv.slice(2);
const bug = options[0] === "--bug" ? options[1] : undefined;
if (options.length && !(options.length === 2 && BUGS.includes(bug))) {
  console.error(`usage: node harness.mjs [--bug ${BUGS.join("|")}]`);
  process.exit(2);
}

const lanes = "[batch_size, num_kv_heads, n, head_dim]";
const tokens = "[n, num_kv_heads, head_dim]";
const queries = "[num_queries, num_query_heads, head_dim]";

serve({
  about: { name: "contiguous-js", version: "1.0", level: "exact", formats: ["float32", "float16", "bfloat16"] },
  families: {
    contiguous: {
      make: (sizes) => new ContiguousCache(sizes),
      sizes: ["batch_size", "num_kv_heads", "head_dim", "initial_capacity >= 0", "max_seq_len", "dtype: format"],
      operations: {
        seq_len: [],
        capacity: [],
        append: [`keys ${lanes}`, `values ${lanes}`],
        append_fused: ["key_values [2, batch_size, num_kv_heads, n, head_dim]"],
        read: [],
        raw: [],
        advance: ["count"],
        reset: [],
      },
    },
    windowed: {
      make: (sizes) => new WindowedCache(sizes),
      sizes: ["num_kv_heads", "head_dim", "window", "sinks >= 0", "chunk >= 0", "rollback >= 0", "dtype: format"],
      operations: {
        length: [],
        stored_tokens: [],
        append: [`keys ${tokens}`, `values ${tokens}`],
        step: [`query ${queries}`, `keys ${tokens}`, `values ${tokens}`, "scale"],
        attend: [`query ${queries}`, "scale"],
        read: ["positions"],
        truncate: ["length"],
        clear: [],
      },
    },
    buffers: {
      make: (sizes) => new BufferPool(sizes, { releasesTwice: bug === "release-twice" }),
      sizes: ["max_buffers"],
      operations: { acquire: ["num_bytes"], prewarm: ["size", "count"], clear: [], stats: [] },
    },
  },
  handedOut: {
    buffer: {
      of: Buffer,
      operations: { size: [], capacity: [], length: [], extend: ["values [n]"], values: [], clear: [], release: [] },
    },
  },
});
