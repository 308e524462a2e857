// A harness in JavaScript without dependencies: a contiguous and a windowed KV cache and a buffer pool, which kvref calls:
//
//     kvref check --exec "node conformance/harnesses/javascript/harness.mjs"
//
// --bug release-twice: a buffer that is released twice is added to the free list twice and then gets two owners.

import { Buffer, BufferPool } from "./buffers.mjs";
import { ContiguousCache } from "./contiguous.mjs";
import { serve } from "./protocol.mjs";
import { WindowedCache } from "./windowed.mjs";

const BUGS = ["release-twice"];

const options = process.argv.slice(2);
const bug = options[0] === "--bug" ? options[1] : undefined;
if (options.length && !(options.length === 2 && BUGS.includes(bug))) {
  console.error(`usage: node harness.mjs [--bug ${BUGS.join("|")}]`);
  process.exit(2);
}

serve({
  about: {
    name: "contiguous-js",
    version: "1.0",
    language: "javascript",
    level: "exact",
    formats: ["float32", "float16", "bfloat16"],
    families: ["contiguous", "windowed", "buffers"],
  },
  make: {
    contiguous: (config) => new ContiguousCache(config),
    windowed: (config) => new WindowedCache(config),
    buffers: (config) => new BufferPool(config, { releasesTwice: bug === "release-twice" }),
  },
  // The operations of each family: methods by name, with the names of their arguments in order.
  operations: {
    contiguous: {
      on: ContiguousCache,
      attributes: ["seq_len", "capacity"],
      methods: { append: ["keys", "values"], append_fused: ["key_values"], read: [], raw: [], advance: ["count"], reset: [] },
    },
    windowed: {
      on: WindowedCache,
      attributes: ["length", "stored_tokens"],
      methods: {
        append: ["keys", "values"],
        step: ["query", "keys", "values", "scale"],
        attend: ["query", "scale"],
        read: ["positions"],
        truncate: ["length"],
        clear: [],
      },
    },
    buffers: {
      on: BufferPool,
      attributes: [],
      methods: { acquire: ["num_bytes"], prewarm: ["size", "count"], clear: [], stats: [] },
    },
    buffer: {
      on: Buffer,
      attributes: ["size", "capacity", "length"],
      methods: { extend: ["values"], values: [], clear: [], release: [] },
    },
  },
});
