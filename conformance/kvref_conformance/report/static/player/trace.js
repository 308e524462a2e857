// The parser of traces (kvref/spec/trace.md defines the format), and functions that print calls and values. The other scripts of
// the player depend on this one.
"use strict";
window.kvref = window.kvref || {};

(() => {
  const VERSION = 1;
  const ITEM_BYTES = { float64: 8, int64: 8, uint64: 8, float32: 4, int32: 4, uint32: 4, float16: 2, bfloat16: 2, int16: 2,
    uint16: 2, int8: 1, uint8: 1, bool: 1 };

  // Matches strings (which stay unchanged), and integers that a JavaScript number might round, such as tokens of 63 bits.
  const LARGE = /"(?:[^"\\]|\\.)*"|(?<![\w.+-])-?\d{16,}(?![\w.])/g;

  class TraceError extends Error {} // the message names the line and the problem

  // Returns the header and the exchanges {request, reply, line}, with the line of the reply. Throws TraceError.
  function parse(text) {
    const lines = text.split(/\r?\n/);
    while (lines.length && !lines.at(-1).trim()) lines.pop();
    if (!lines.length) throw new TraceError("The file is empty. A trace begins with a line {\"trace\": 1, ...}.");
    const messages = lines.map(message);
    const header = messages[0];
    if (!("trace" in header)) throw new TraceError(`Line 1: expected a header, {"trace": 1, ...}, got ${cut(lines[0])}`);
    if (header.trace !== VERSION) {
      const version = cut(JSON.stringify(header.trace));
      throw new TraceError(`Line 1: a trace of version ${version}; this player reads version ${VERSION}.`);
    }
    const exchanges = [], ids = new Set();
    for (let at = 1; at < lines.length; at += 2) {
      const request = messages[at], reply = messages[at + 1];
      checkRequest(request, at + 1, ids);
      if (!reply) throw new TraceError(`Line ${at + 1}: the trace ends with a request that has no reply.`);
      if (reply.id !== request.id) {
        throw new TraceError(`Line ${at + 2}: expected the reply to request ${request.id}, got ${cut(lines[at + 1])}`);
      }
      checkReply(reply, at + 2);
      ids.add(request.id);
      exchanges.push({ request, reply, line: at + 2, family: request.op.split(".")[0], name: request.op.split(".")[1] });
    }
    if (!exchanges.length) throw new TraceError("Line 2: the trace has a header but no calls.");
    return { header, exchanges };
  }

  function message(line, index) {
    let found;
    try {
      found = JSON.parse(line.replace(LARGE, (word) => (word.startsWith('"') ? word : `{"number": "${word}"}`)));
    } catch {
      throw new TraceError(`Line ${index + 1}: not JSON: ${cut(line)}`);
    }
    if (!isObject(found)) throw new TraceError(`Line ${index + 1}: expected an object, got ${cut(line)}`);
    checkArrays(found, index + 1);
    return found;
  }

  function checkRequest(request, line, ids) {
    const wrong = (what, got) => new TraceError(`Line ${line}: expected ${what}, got ${cut(JSON.stringify(got) ?? "nothing")}`);
    const isOp = typeof request.op === "string" && /^[a-z]+\.[a-z]\w*$/.test(request.op);
    if (!isOp) throw wrong("a request, with an op FAMILY.NAME", request);
    if (!Number.isInteger(request.id) || request.id < 1) throw wrong("an id, counted from 1", request.id);
    if (ids.has(request.id)) throw wrong("an id not used before", request.id);
    if (!isObject(request.args)) throw wrong("args by name", request.args);
    if ("on" in request && !ids.has(request.on)) throw wrong("the id of an earlier request as on", request.on);
    for (const value of Object.values(request.args).flat()) {
      const named = value?.handle ?? value?.reply;
      if (named !== undefined && !ids.has(named)) throw wrong("a reference to an earlier request", value);
    }
  }

  function checkReply({ error, got }, line) {
    for (const said of [error, got?.error]) {
      if (said === undefined) continue;
      const kinds = isObject(said) ? kindsOf(said) : null;
      if (!Array.isArray(kinds) || !kinds.every((kind) => typeof kind === "string")) {
        throw new TraceError(`Line ${line}: expected an error with its kind, got ${cut(JSON.stringify(said))}`);
      }
    }
  }

  function checkArrays(value, line) {
    if (Array.isArray(value)) return value.forEach((part) => checkArrays(part, line));
    if (!isObject(value)) return undefined;
    if (!("base64" in value)) return Object.values(value).forEach((part) => checkArrays(part, line));
    const { dtype, shape, base64 } = value;
    if (!(dtype in ITEM_BYTES)) throw new TraceError(`Line ${line}: no dtype ${cut(JSON.stringify(dtype) ?? "given")}`);
    if (!Array.isArray(shape) || !shape.every((n) => Number.isInteger(n) && n >= 0)) {
      throw new TraceError(`Line ${line}: expected a shape, got ${cut(JSON.stringify(shape) ?? "nothing")}`);
    }
    const needed = size(value) * ITEM_BYTES[dtype];
    const isText = typeof base64 === "string" && /^[A-Za-z0-9+/]*=*$/.test(base64);
    const found = isText ? (base64.length / 4) * 3 - (base64.match(/=*$/)[0].length) : null;
    if (found !== needed) {
      const got = isText ? `${found} bytes` : "no base64";
      throw new TraceError(`Line ${line}: ${dtype} [${shape.join(", ")}] needs ${needed} bytes, got ${got}`);
    }
    return undefined;
  }

  const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
  const isArray = (value) => isObject(value) && "base64" in value;
  const kindsOf = (error) => error.kinds ?? (error.kind === undefined ? [] : [error.kind]);
  const size = (array) => array.shape.reduce((product, n) => product * n, 1);
  const cut = (text) => (text.length > 60 ? `${text.slice(0, 60)}…` : text);

  // The numbers of an array, in C order, as JavaScript numbers (BigInt if a number would be rounded).
  function numbers(array) {
    const bytes = Uint8Array.from(atob(array.base64), (char) => char.charCodeAt(0));
    const view = new DataView(bytes.buffer), step = ITEM_BYTES[array.dtype];
    const read = {
      float64: (at) => view.getFloat64(at, true), float32: (at) => view.getFloat32(at, true),
      float16: (at) => half(view.getUint16(at, true)), bfloat16: (at) => bfloat(view.getUint16(at, true)),
      int64: (at) => exact(view.getBigInt64(at, true)), uint64: (at) => exact(view.getBigUint64(at, true)),
      int32: (at) => view.getInt32(at, true), uint32: (at) => view.getUint32(at, true),
      int16: (at) => view.getInt16(at, true), uint16: (at) => view.getUint16(at, true),
      int8: (at) => view.getInt8(at), uint8: (at) => view.getUint8(at), bool: (at) => Boolean(view.getUint8(at)),
    }[array.dtype];
    return Array.from({ length: size(array) }, (_, index) => read(index * step));
  }

  const exact = (integer) => (Number.isSafeInteger(Number(integer)) ? Number(integer) : integer);

  function half(bits) {
    const sign = bits >> 15 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
  }

  function bfloat(bits) {
    const view = new DataView(new ArrayBuffer(4));
    view.setUint32(0, bits << 16);
    return view.getFloat32(0);
  }

  // A number with the shortest digits that identify it in its dtype: 0.1, not 0.10000000149011612.
  function short(number, dtype = "float64") {
    const isFraction = typeof number === "number" && dtype.includes("float") && Number.isFinite(number);
    if (!isFraction) return String(number).replace("Infinity", "inf");
    if (Object.is(number, -0)) return "-0";
    for (let digits = 1; dtype !== "float64" && digits <= 9; digits++) {
      const shorter = Number(number.toPrecision(digits));
      if (Math.fround(shorter) === number) return String(shorter);
    }
    return String(number);
  }

  // A value as readable text: large arrays by dtype and shape, small arrays in full.
  function show(value, names = new Map()) {
    if (isArray(value)) {
      if (size(value) > 4 || size(value) === 0) return `${value.dtype}[${value.shape.join(", ")}]`;
      const words = numbers(value).map((number) => short(number, value.dtype));
      return value.shape.reduceRight((parts, n) => {
        const rows = [];
        for (let at = 0; at < parts.length; at += n) rows.push(`[${parts.slice(at, at + n).join(", ")}]`);
        return rows;
      }, words)[0];
    }
    if (Array.isArray(value)) return `[${value.map((part) => show(part, names)).join(", ")}]`;
    if (value === null || value === undefined) return "None";
    if (typeof value === "boolean") return value ? "True" : "False";
    if (!isObject(value)) return typeof value === "string" ? `'${value}'` : String(value);
    if ("handle" in value || "reply" in value) return names.get(value.handle ?? value.reply) ?? `#${value.handle ?? value.reply}`;
    if ("number" in value) return value.number;
    return `{${Object.entries(value).map(([name, part]) => `${name}: ${show(part, names)}`).join(", ")}}`;
  }

  // The names of results, by the id of the request: paged, block, block2, and A for the first sequence of a cache.
  const done = (reply) => (!reply.error || "ok" in reply) && !reply.none; // otherwise the call changed nothing
  const GIVES = { "buffers.acquire": "buffer", "blocks.allocate": "block", "engine.save": "saved" };
  const BEGUN = ["paged.create", "paged.fork", "prefix.create", "prefix.fork", "prefix.begin", "engine.open", "engine.fork",
    "engine.load"];
  const letter = (number) => (number < 26 ? String.fromCharCode(65 + number) : `S${number}`);
  function namesOf(exchanges) {
    const names = new Map(), count = {};
    for (const { request, reply, family, name } of exchanges) {
      if (!done(reply)) continue;
      const made = BEGUN.includes(request.op) ? `${request.on}` : name === "new" ? family : GIVES[request.op];
      if (!made) continue;
      count[made] = (count[made] ?? 0) + 1;
      const numbered = count[made] === 1 ? made : `${made}${count[made]}`;
      names.set(request.id, BEGUN.includes(request.op) ? letter(count[made] - 1) : numbered);
    }
    return names;
  }

  // Attributes, which are shown without parentheses.
  const ATTRIBUTES = ["seq_len", "capacity", "num_blocks", "num_free", "num_used", "utilization", "num_free_blocks",
    "memory_bytes", "fp32_bytes", "compression_ratio", "total_tokens", "size", "length", "address"];

  // The call of an exchange as a line of Python.
  function call({ request, family, name }, names) {
    const words = Object.entries(request.args).map(([key, value]) => `${key}=${show(value, names)}`).join(", ");
    const target = name === "new" ? family : `${names.get(request.on) ?? family}.${name}`;
    const attribute = !words && ATTRIBUTES.includes(name);
    return `${names.has(request.id) ? `${names.get(request.id)} = ` : ""}${target}${attribute ? "" : `(${words})`}`;
  }

  function outcome(reply) {
    if (reply.none) return "nothing: the call hung, or the process ended";
    if (reply.error && !("ok" in reply)) {
      return (kindsOf(reply.error).join(" or ") || "an error") + (reply.any ? " or any result" : "");
    }
    if (reply.any) return "any result";
    if (!("ok" in reply) && reply.chosen) return reply.chosen;
    return isObject(reply.ok) && "handle" in reply.ok ? "an object" : reply.ok === null ? "done" : show(reply.ok);
  }

  // The first mismatch of a trace: {step, what, expected, got}, or null.
  function parting({ header, exchanges }) {
    const step = exchanges.findIndex(({ reply }) => reply.got || reply.failed);
    if (step < 0) return null;
    const { reply } = exchanges[step], said = reply.failed ?? header.failed;
    if (reply.got) {
      const message = reply.got.error?.message ? ` (${reply.got.error.message})` : "";
      return { step, what: said?.what ?? exchanges[step].request.op, expected: said?.expected ?? outcome(reply),
        got: said?.got ?? outcome(reply.got) + message };
    }
    return { step, what: said.what ?? "", expected: said.expected ?? "", got: said.got ?? "" };
  }

  Object.assign(window.kvref, {
    TraceError, parse, done, parting, namesOf, letter, call, outcome, numbers, short, isArray,
  });
})();
