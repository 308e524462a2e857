// What the objects of a trace hold after each of its exchanges: block tables, free blocks, tiers. A trace has no memory in
// it, only calls and replies, so the state is worked out from the calls as the specification says. Which block a cache chose
// is known from what it answered, also from answers that come later: until a sequence is dropped, its table only grows.
"use strict";

(() => {
  const { FAMILIES, numbers, isArray } = window.kvref;
  const SNAPSHOT = 256; // steps between two states that are kept

  // The states of a trace: at(0) before anything was said, at(k) after exchange k, counted from 1.
  class Worlds {
    constructor(trace) {
      this.exchanges = trace.exchanges;
      this.replies = new Map(trace.exchanges.map(({ request, reply }) => [request.id, reply.ok]));
      this.blocks = this.learned();
      this.kept = new Map([[0, { objects: new Map(), touched: new Map(), last: null }]]);
    }

    at(step) {
      let from = step - (step % SNAPSHOT);
      while (!this.kept.has(from)) from -= SNAPSHOT;
      const world = structuredClone(this.kept.get(from));
      for (let now = from + 1; now <= step; now++) {
        this.apply(world, this.exchanges[now - 1]);
        if (now % SNAPSHOT === 0) this.kept.set(now, structuredClone(world));
      }
      return world;
    }

    value(argument) { // an argument, with what an earlier request gave in its place, and a number of any type as a number
      if (Array.isArray(argument)) return argument.map((part) => this.value(part));
      if (isArray(argument) && argument.shape.length === 0) return numbers(argument)[0];
      return argument?.reply === undefined ? argument : this.replies.get(argument.reply);
    }

    apply(world, exchange) {
      const { request, reply, family, name } = exchange;
      world.touched = new Map();
      world.last = request.on ?? request.id;
      if ((reply.error && !("ok" in reply)) || reply.none || !(family in FAMILIES)) return;
      const args = Object.fromEntries(Object.entries(request.args).map(([key, value]) => [key, this.value(value)]));
      const touch = (kind, ...place) => world.touched.set(place.join("/"), kind);
      const context = { world, reply, args, touch, id: request.id, on: request.on,
        block: (...place) => this.blocks.get([request.on, ...place].join("/")) };
      if (name === "new") {
        world.objects.set(request.id, { id: request.id, family, ...FAMILIES[family].new(args) });
        return;
      }
      const object = world.objects.get(request.on);
      if (object && name in FAMILIES[family]) FAMILIES[family][name](object, args, context);
    }

    // Which block is which entry of a table, by object, sequence, layer and entry, from every answer that says so.
    learned() {
      const found = new Map(), sizes = new Map();
      for (const { request, reply, family, name } of this.exchanges) {
        if (family !== "paged" || reply.error || reply.got || reply.failed) continue;
        if (name === "new") sizes.set(request.id, this.value(request.args.block_size));
        const layer = this.value(request.args.layer), start = this.value(request.args.start);
        const learn = (sequence, entry, block) => found.set([request.on, sequence, layer, entry].join("/"), block);
        const answer = isArray(reply.ok) ? numbers(reply.ok) : reply.ok;
        if (!Array.isArray(answer)) continue;
        if (name === "block_table") answer.forEach((block, entry) => learn(this.value(request.args.sequence), entry, block));
        if (name === "slot_mapping") {
          const size = sizes.get(request.on), sequence = this.value(request.args.sequence);
          answer.forEach((slot, index) => learn(sequence, Math.floor((start + index) / size), Math.floor(slot / size)));
        }
        if (name === "block_tables" && isArray(reply.ok)) {
          const width = reply.ok.shape[1];
          this.value(request.args.sequences).forEach((sequence, row) => {
            for (let entry = 0; entry < width; entry++) {
              const block = answer[row * width + entry];
              if (block >= 0) learn(sequence, entry, block);
            }
          });
        }
      }
      return found;
    }
  }

  window.kvref.Worlds = Worlds;
})();
