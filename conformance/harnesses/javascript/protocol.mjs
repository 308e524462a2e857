// The protocol: one JSON object per line, a reply for each request (kvref/spec/protocol.md).

import { createInterface } from "node:readline";

/** The error that a cache throws. `kind` is one of the specification's error names. */
export class KVError extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

/** Reply to every line of standard input until `bye` or the end of the input. */
export function serve({ about, make, operations }) {
  const objects = new Map(); // by the id of the request that created them
  const lines = createInterface({ input: process.stdin });

  function perform({ id, op, on, args }) {
    if (op === "hello") {
      objects.clear(); // a new sequence of calls starts
      return about;
    }
    if (op === "bye") {
      lines.close();
      return null;
    }
    const [family, name] = op.split(".");
    if (name === "new") {
      if (!(family in make)) throw new KVError("NotOffered", `family ${family}`);
      objects.set(id, make[family](args));
      return { handle: id };
    }
    const object = objects.get(on);
    const offered = operations[family];
    if (!offered || !(object instanceof offered.on)) throw new KVError("NotOffered", `${op} on object ${on}`);
    if (offered.attributes.includes(name)) return object[name];
    if (!(name in offered.methods)) throw new KVError("NotOffered", op);
    const result = object[name](...offered.methods[name].map((argument) => args[argument]));
    if (op === "buffers.acquire") {
      objects.set(id, result);
      return { handle: id };
    }
    return result ?? null;
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
}
